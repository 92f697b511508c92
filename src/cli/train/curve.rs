//! Draws a loss curve: as SVG, or with dots in the terminal.

use std::fmt::Write;

/// A line: points from left to right.
pub struct Curve {
    /// What the vertical axis shows.
    pub label: &'static str,
    /// Step and value.
    pub points: Vec<(f64, f64)>,
}

impl Curve {
    /// The bounds of the drawing: left, right, bottom, top. `None` if there is nothing to draw.
    fn bounds(&self) -> Option<(f64, f64, f64, f64)> {
        let finite = || self.points.iter().filter(|(x, y)| x.is_finite() && y.is_finite());
        let fold = |pick: fn(&(f64, f64)) -> f64, f: fn(f64, f64) -> f64| finite().map(pick).reduce(f);
        let (left, right) = (fold(|p| p.0, f64::min)?, fold(|p| p.0, f64::max)?);
        let top = fold(|p| p.1, f64::max)?;
        let bottom = fold(|p| p.1, f64::min)?.min(0.0);
        let at_least = |low: f64, high: f64| if high > low { high } else { low + 1.0 };
        Some((left, at_least(left, right), bottom, at_least(bottom, top)))
    }

    /// A running mean over `n` points, so that single batches do not hide the trend.
    pub fn smoothed(&self, n: usize) -> Curve {
        let n = n.max(1);
        let mut sum = 0.0;
        let mut points = Vec::with_capacity(self.points.len());
        for (i, (x, y)) in self.points.iter().enumerate() {
            sum += y;
            if i >= n {
                sum -= self.points[i - n].1;
            }
            points.push((*x, sum / (i + 1).min(n) as f64));
        }
        Curve { label: self.label, points }
    }

    /// The curve as an SVG picture: pale as measured, strong as smoothed.
    pub fn to_svg(&self) -> String {
        const WIDTH: f64 = 720.0;
        const HEIGHT: f64 = 360.0;
        const MARGIN: f64 = 48.0;
        let (left, right, bottom, top) = self.bounds().unwrap_or((0.0, 1.0, 0.0, 1.0));
        let x_of = |x: f64| MARGIN + (x - left) / (right - left) * (WIDTH - 2.0 * MARGIN);
        let y_of = |y: f64| HEIGHT - MARGIN - (y - bottom) / (top - bottom) * (HEIGHT - 2.0 * MARGIN);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
             font-size=\"12\" fill=\"#444\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n"
        );
        for i in 0..=4 {
            let y = bottom + (top - bottom) * f64::from(i) / 4.0;
            let x = left + (right - left) * f64::from(i) / 4.0;
            // A string takes no error; the results of `write!` say nothing.
            let _ = writeln!(
                svg,
                "<line x1=\"{MARGIN}\" x2=\"{:.1}\" y1=\"{2:.1}\" y2=\"{2:.1}\" stroke=\"#e4e4e4\"/>\
                 <text x=\"{3:.1}\" y=\"{4:.1}\" text-anchor=\"end\">{1}</text>\
                 <text x=\"{5:.1}\" y=\"{6:.1}\" text-anchor=\"middle\">{7:.0}</text>",
                WIDTH - MARGIN,
                short(y),
                y_of(y),
                MARGIN - 6.0,
                y_of(y) + 4.0,
                x_of(x),
                HEIGHT - MARGIN + 18.0,
                x
            );
        }
        let smooth = self.smoothed(self.points.len() / 50);
        for (curve, style) in [
            (self, "stroke=\"#9db8dd\" stroke-width=\"1\""),
            (&smooth, "stroke=\"#1f4e9c\" stroke-width=\"2\" stroke-linejoin=\"round\""),
        ] {
            let path: Vec<String> = curve
                .thinned(2000)
                .filter(|(x, y)| x.is_finite() && y.is_finite())
                .map(|(x, y)| format!("{:.1},{:.1}", x_of(x), y_of(y)))
                .collect();
            let _ = writeln!(svg, "<polyline fill=\"none\" {style} points=\"{}\"/>", path.join(" "));
        }
        let _ = writeln!(
            svg,
            "<text x=\"{MARGIN}\" y=\"24\" font-size=\"15\">{}</text><text x=\"{:.1}\" y=\"{:.1}\" \
             text-anchor=\"middle\">step</text>\n</svg>",
            self.label,
            WIDTH / 2.0,
            HEIGHT - 8.0
        );
        svg
    }

    /// The smoothed curve in `width` × `height` characters, two by four dots each, with its axes.
    pub fn to_text(&self, width: usize, height: usize) -> String {
        let Some((left, right, bottom, top)) = self.bounds() else { return String::new() };
        let (columns, rows) = (width.max(8) * 2, height.max(3) * 4);
        let mut cells = vec![0u8; width.max(8) * height.max(3)];
        let mut before: Option<usize> = None;
        let smooth = self.smoothed(self.points.len() / 50);
        for column in 0..columns {
            let x = left + (right - left) * column as f64 / (columns - 1) as f64;
            let at = smooth.points.partition_point(|(px, _)| *px < x).min(smooth.points.len() - 1);
            let y = smooth.points[at].1;
            if !y.is_finite() {
                before = None;
                continue;
            }
            let row = ((top - y) / (top - bottom) * (rows - 1) as f64).round().clamp(0.0, (rows - 1) as f64) as usize;
            // Steep parts are joined, so that the line has no holes.
            let from = before.unwrap_or(row);
            for dot in from.min(row)..=from.max(row) {
                cells[dot / 4 * (columns / 2) + column / 2] |= braille_bit(column % 2, dot % 4);
            }
            before = Some(row);
        }
        let mut text = String::new();
        for (i, line) in cells.chunks(columns / 2).enumerate() {
            let label = match i {
                0 => short(top),
                i if i + 1 == rows / 4 => short(bottom),
                _ => String::new(),
            };
            let dots: String = line.iter().filter_map(|bits| char::from_u32(0x2800 + u32::from(*bits))).collect();
            let _ = writeln!(text, "{label:>8} │{dots}");
        }
        let _ = writeln!(text, "{:>8} └{}", "", "─".repeat(columns / 2));
        let _ =
            write!(text, "{:>9} {left:<12.0}{:>fill$.0}  {} by step", "", right, self.label, fill = columns / 2 - 12);
        text
    }

    /// At most about `n` points, evenly chosen, the last among them.
    fn thinned(&self, n: usize) -> impl Iterator<Item = (f64, f64)> + '_ {
        let every = (self.points.len() / n.max(1)).max(1);
        let last = self.points.len().wrapping_sub(1);
        self.points.iter().enumerate().filter(move |(i, _)| i % every == 0 || *i == last).map(|(_, point)| *point)
    }
}

/// The bit of a dot in a braille character: two columns, four rows.
fn braille_bit(column: usize, row: usize) -> u8 {
    const BITS: [[u8; 4]; 2] = [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]];
    BITS[column][row]
}

/// A number in a few characters.
fn short(y: f64) -> String {
    match y.abs() {
        0.0 => "0".to_owned(),
        a if a >= 100.0 => format!("{y:.0}"),
        a if a >= 1.0 => format!("{y:.2}"),
        a if a >= 0.001 => format!("{y:.4}"),
        _ => format!("{y:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn falling() -> Curve {
        Curve { label: "loss", points: (0..100).map(|i| (f64::from(i), 1.0 / (1.0 + f64::from(i)))).collect() }
    }

    #[test]
    fn smoothing_is_a_running_mean() {
        let curve = Curve { label: "loss", points: vec![(0.0, 1.0), (1.0, 3.0), (2.0, 5.0), (3.0, 7.0)] };
        let smooth: Vec<f64> = curve.smoothed(2).points.iter().map(|p| p.1).collect();
        assert_eq!(smooth, [1.0, 2.0, 4.0, 6.0]);
    }

    #[test]
    fn the_text_falls_from_the_top_left() {
        let text = falling().to_text(20, 5);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 7);
        assert!(lines[0].starts_with("    1.00 │"), "{text}");
        assert_ne!(lines[0].chars().nth(10), Some('\u{2800}'), "the first column begins at the top:\n{text}");
        assert_eq!(lines[0].chars().last(), Some('\u{2800}'), "the last column is not at the top:\n{text}");
        assert!(lines[6].contains("0") && lines[6].contains("99") && lines[6].contains("loss by step"), "{text}");
    }

    #[test]
    fn the_svg_is_whole_and_skips_what_is_not_finite() {
        let mut curve = falling();
        curve.points.push((100.0, f64::NAN));
        let svg = curve.to_svg();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(!svg.contains("NaN"));
    }

    #[test]
    fn nothing_draws_nothing() {
        let none = Curve { label: "loss", points: Vec::new() };
        assert_eq!(none.to_text(20, 5), "");
        assert!(none.to_svg().contains("</svg>"));
    }
}
