//! Paints a scene as PNG: lines with tiny-skia, text with bitmap glyphs that are part of the binary, so that no font has to be
//! installed.

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};
use tiny_skia::{
    Color, FillRule, LineCap, LineJoin, Paint, PathBuilder, Pixmap, PremultipliedColorU8, Stroke, Transform,
};

use super::scene::{Anchor, Colour, Scene, Shape};
use crate::BenchError;

const GLYPH_HEIGHT: RasterHeight = RasterHeight::Size16;
/// From the top of a glyph's box to its baseline.
const ASCENT: f64 = 12.0;

pub fn paint(scene: &Scene) -> Result<Vec<u8>, BenchError> {
    let failed =
        |cause: &dyn std::fmt::Display| BenchError::Failed(format!("the picture cannot be made: {cause}"));
    let mut pixels =
        Pixmap::new(scene.width as u32, scene.height as u32).ok_or_else(|| failed(&"its size"))?;
    pixels.fill(Color::WHITE);
    for shape in &scene.shapes {
        match shape {
            Shape::Line { points, colour, width } => line(&mut pixels, points, *colour, *width),
            Shape::Dot { at, radius, colour, .. } => dot(&mut pixels, *at, *radius, *colour),
            Shape::Text { at, text, colour, anchor } => write(&mut pixels, *at, text, *colour, *anchor),
        }
    }
    pixels.encode_png().map_err(|cause| failed(&cause))
}

fn ink([red, green, blue]: Colour) -> Paint<'static> {
    let mut paint = Paint::default();
    paint.set_color_rgba8(red, green, blue, 255);
    paint.anti_alias = true;
    paint
}

fn line(pixels: &mut Pixmap, points: &[(f64, f64)], colour: Colour, width: f64) {
    let mut path = PathBuilder::new();
    for (index, &(x, y)) in points.iter().enumerate() {
        if index == 0 {
            path.move_to(x as f32, y as f32);
        } else {
            path.line_to(x as f32, y as f32);
        }
    }
    let stroke = Stroke {
        width: width as f32,
        line_cap: LineCap::Round,
        line_join: LineJoin::Round,
        ..Stroke::default()
    };
    // A line of one point has no path.
    if let Some(path) = path.finish() {
        pixels.stroke_path(&path, &ink(colour), &stroke, Transform::identity(), None);
    }
}

fn dot(pixels: &mut Pixmap, (x, y): (f64, f64), radius: f64, colour: Colour) {
    if let Some(path) = PathBuilder::from_circle(x as f32, y as f32, radius as f32) {
        pixels.fill_path(&path, &ink(colour), FillRule::Winding, Transform::identity(), None);
    }
}

fn write(pixels: &mut Pixmap, (x, y): (f64, f64), text: &str, colour: Colour, anchor: Anchor) {
    let advance = get_raster_width(FontWeight::Regular, GLYPH_HEIGHT);
    let width = (text.chars().count() * advance) as f64;
    let left = match anchor {
        Anchor::Start => x,
        Anchor::Middle => x - width / 2.0,
        Anchor::End => x - width,
    };
    let (mut left, top) = (left.round() as i64, (y - ASCENT).round() as i64);
    for character in text.chars() {
        // What the bitmaps do not have is a question mark.
        let glyph = get_raster(character, FontWeight::Regular, GLYPH_HEIGHT).or_else(|| {
            get_raster(if character == '·' { '-' } else { '?' }, FontWeight::Regular, GLYPH_HEIGHT)
        });
        let Some(glyph) = glyph else { continue };
        for (row, line) in glyph.raster().iter().enumerate() {
            for (column, &strength) in line.iter().enumerate() {
                blend(pixels, left + column as i64, top + row as i64, colour, strength);
            }
        }
        left += advance as i64;
    }
}

/// Puts a colour over a pixel, `strength` of 255 thick.
fn blend(pixels: &mut Pixmap, x: i64, y: i64, colour: Colour, strength: u8) {
    let (width, height) = (i64::from(pixels.width()), i64::from(pixels.height()));
    if strength == 0 || !(0..width).contains(&x) || !(0..height).contains(&y) {
        return;
    }
    let pixel = &mut pixels.pixels_mut()[(y * width + x) as usize];
    let mix = |old: u8, new: u8| {
        let strength = u32::from(strength);
        ((u32::from(old) * (255 - strength) + u32::from(new) * strength) / 255) as u8
    };
    let (red, green, blue) =
        (mix(pixel.red(), colour[0]), mix(pixel.green(), colour[1]), mix(pixel.blue(), colour[2]));
    if let Some(mixed) = PremultipliedColorU8::from_rgba(red, green, blue, 255) {
        *pixel = mixed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dark_pixels(scene: &Scene) -> usize {
        let png = paint(scene).unwrap();
        let pixels = Pixmap::decode_png(&png).unwrap();
        pixels.pixels().iter().filter(|pixel| pixel.red() < 128).count()
    }

    #[test]
    fn shapes_leave_ink_where_they_are() {
        let mut scene = Scene::new(60.0, 30.0);
        assert_eq!(dark_pixels(&scene), 0);
        scene.line(vec![(0.0, 10.0), (60.0, 10.0)], [0, 0, 0], 2.0);
        assert_eq!(dark_pixels(&scene), 120);
        scene.text((30.0, 25.0), "ab é", [0, 0, 0], Anchor::Middle);
        assert!(dark_pixels(&scene) > 140);
        // Pixels beyond the border are not an error.
        scene.text((-20.0, 500.0), "outside", [0, 0, 0], Anchor::End);
        scene.line(vec![(5.0, 5.0)], [0, 0, 0], 1.0);
        assert!(paint(&scene).is_ok());
        assert!(paint(&Scene::default()).is_err());
    }
}
