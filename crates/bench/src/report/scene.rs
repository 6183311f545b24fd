//! A scene of coloured lines, dots and texts, in pixels from the top left corner.

/// Red, green, blue.
pub type Colour = [u8; 3];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

#[derive(Clone, Debug)]
pub enum Shape {
    Line {
        points: Vec<(f64, f64)>,
        colour: Colour,
        width: f64,
    },
    Dot {
        at: (f64, f64),
        radius: f64,
        colour: Colour,
        tip: String,
    },
    /// `at` is the anchor on the baseline.
    Text {
        at: (f64, f64),
        text: String,
        colour: Colour,
        anchor: Anchor,
    },
}

#[derive(Clone, Debug, Default)]
pub struct Scene {
    pub width: f64,
    pub height: f64,
    pub shapes: Vec<Shape>,
}

impl Scene {
    pub fn new(width: f64, height: f64) -> Self {
        Self { width, height, shapes: Vec::new() }
    }

    pub fn line(&mut self, points: Vec<(f64, f64)>, colour: Colour, width: f64) {
        self.shapes.push(Shape::Line { points, colour, width });
    }

    pub fn text(&mut self, at: (f64, f64), text: impl Into<String>, colour: Colour, anchor: Anchor) {
        self.shapes.push(Shape::Text { at, text: text.into(), colour, anchor });
    }

    /// Puts another drawing onto this one.
    pub fn place(&mut self, other: &Scene, (dx, dy): (f64, f64)) {
        let moved = |(x, y): (f64, f64)| (x + dx, y + dy);
        self.shapes.extend(other.shapes.iter().cloned().map(|mut shape| {
            match &mut shape {
                Shape::Line { points, .. } => points.iter_mut().for_each(|point| *point = moved(*point)),
                Shape::Dot { at, .. } | Shape::Text { at, .. } => *at = moved(*at),
            }
            shape
        }));
    }
}
