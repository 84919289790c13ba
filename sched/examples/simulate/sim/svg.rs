//! Parts of charts.

use std::fmt::Write;

/// A colour per policy.
pub const COLOURS: [&str; 5] = ["#b0413e", "#d98c3f", "#8a8d3f", "#2f6f8f", "#1b3a5c"];

/// Opens a picture of this size with a white background.
pub fn open(width: u32, height: u32) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    )
}

fn rect(svg: &mut String, (x, y): (f64, f64), (width, height): (f64, f64), colour: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
    );
}

pub fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, content: &str) {
    let escaped = content.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#222222\">{escaped}</text>");
}

/// Draws a line through points.
fn line(svg: &mut String, points: impl Iterator<Item = (f64, f64)>, colour: &str) {
    let points: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(
        svg,
        "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.5\" points=\"{}\"/>",
        points.join(" ")
    );
}

/// A rectangle with a title above it.
#[derive(Clone, Copy)]
pub struct Panel {
    pub left: f64,
    pub top: f64,
    pub width: f64,
    pub height: f64,
}

impl Panel {
    /// Draws a line per series over equidistant marks, from 0 to a round number.
    pub fn lines(&self, svg: &mut String, title: &str, marks: &[String], series: &[(&str, Vec<f64>)]) {
        let &Panel { left, top, width, height } = self;
        let greatest = series.iter().flat_map(|(_, values)| values).fold(1.0, |a: f64, b| a.max(*b));
        let unit = 10f64.powf(greatest.log10().floor());
        let step = [0.2, 0.5, 1.0, 2.0].into_iter().map(|m| m * unit).find(|s| greatest / s <= 6.0).unwrap_or(unit);
        let most = (greatest / step).ceil() * step;
        let x = |at: usize| left + width * at as f64 / (marks.len() - 1).max(1) as f64;
        let y = |value: f64| top + height * (1.0 - value / most);
        text(svg, (left, top - 12.0), "start", title);
        for mark in 0..=(most / step).round() as usize {
            let value = mark as f64 * step;
            rect(svg, (left, y(value)), (width, 1.0), "#dddddd");
            text(svg, (left - 6.0, y(value) + 4.0), "end", &format!("{value:.0}"));
        }
        for (at, mark) in marks.iter().enumerate() {
            text(svg, (x(at), top + height + 18.0), "middle", mark);
        }
        for (colour, values) in series {
            line(svg, values.iter().enumerate().map(|(at, value)| (x(at), y(*value))), colour);
        }
    }

    /// Draws a bar with a label per value, as high as the panel at `most`.
    pub fn bars(&self, svg: &mut String, title: &str, most: f64, bars: &[(&str, f64, String)]) {
        let &Panel { left, top, width, height } = self;
        let each = width / bars.len() as f64;
        text(svg, (left, top - 12.0), "start", title);
        rect(svg, (left, top + height), (width, 1.0), "#888888");
        for (k, (colour, value, label)) in bars.iter().enumerate() {
            let (x, high) = (left + each * k as f64, height * value / most);
            rect(svg, (x + 6.0, top + height - high), (each - 12.0, high), colour);
            text(svg, (x + each / 2.0, top + height + 18.0), "middle", label);
        }
    }
}

/// Draws a legend in rows of three.
pub fn legend(svg: &mut String, (left, top): (f64, f64), entries: impl Iterator<Item = (&'static str, &'static str)>) {
    for (k, (colour, name)) in entries.enumerate() {
        let (x, y) = (left + 260.0 * (k % 3) as f64, top + 22.0 * (k / 3) as f64);
        rect(svg, (x, y - 10.0), (12.0, 12.0), colour);
        text(svg, (x + 18.0, y), "start", name);
    }
}
