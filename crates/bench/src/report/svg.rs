//! Writes a scene as SVG for the HTML page.

use std::fmt::Write;

use super::scene::{Anchor, Colour, Scene, Shape};

/// Text that is not markup.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn hex([red, green, blue]: Colour) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

pub fn write(scene: &Scene) -> String {
    let mut svg = format!(
        "<svg viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" role=\"img\">\n",
        scene.width, scene.height
    );
    for shape in &scene.shapes {
        let _ = match shape {
            Shape::Line { points, colour, width } => {
                let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
                writeln!(
                    svg,
                    "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\"/>",
                    points.join(" "),
                    hex(*colour)
                )
            }
            Shape::Dot { at: (x, y), radius, colour, tip } => writeln!(
                svg,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{}\" data-tip=\"{}\"/>",
                hex(*colour),
                escape(tip)
            ),
            Shape::Text { at: (x, y), text, colour, anchor } => {
                let anchor = match anchor {
                    Anchor::Start => "start",
                    Anchor::Middle => "middle",
                    Anchor::End => "end",
                };
                writeln!(
                    svg,
                    "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{}\">{}</text>",
                    hex(*colour),
                    escape(text)
                )
            }
        };
    }
    svg.push_str("</svg>\n");
    svg
}
