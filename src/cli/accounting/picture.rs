//! A report as a picture: bars for each group, those with the most GPU-hours.

use std::fmt::Write as _;

use super::report::{Group, Report};
use crate::svg::{COLOURS, begun, escaped, text};

/// More groups than these would not fit on a page.
const MOST: usize = 20;

const WIDTH: f64 = 930.0;
/// Where bars begin and end, and where the first one stands.
const BARS: [f64; 3] = [250.0, 850.0, 100.0];
/// The height of a group, and of a bar in it.
const GROUP: f64 = 44.0;
const BAR: f64 = 8.0;

/// What the bars of a group are.
type Figure = (&'static str, fn(&Group) -> Option<f64>);
const FIGURES: [Figure; 4] = [
    ("held, each GPU whole", |group| Some(group.whole_gpu_hours)),
    ("by the share of the SMs", |group| Some(group.sm_gpu_hours)),
    ("by the share of the memory", |group| Some(group.memory_gpu_hours)),
    ("used, as far as the driver tells", |group| group.used_gpu_hours),
];

/// The picture; `name` is what people call a group.
pub fn svg(report: &Report, name: &dyn Fn(&Group) -> String) -> String {
    let shown = &report.rows[..report.rows.len().min(MOST)];
    let figures = |group: &Group| FIGURES.map(|(_, figure)| figure(group).unwrap_or_default());
    let most = shown.iter().flat_map(figures).fold(0.001, f64::max);
    let height = BARS[2] + GROUP * crate::shown::float(shown.len() as u64) + 30.0;
    let title = format!("GPU-hours from {} to {}", report.since, report.until);
    let mut svg = begun((WIDTH, height), &title);
    text(&mut svg, (20.0, 36.0), "title", &title);
    let mut x = 20.0;
    for ((words, _), colour) in FIGURES.iter().zip(COLOURS) {
        let _ = writeln!(svg, "<rect x=\"{x}\" y=\"58\" width=\"12\" height=\"12\" fill=\"{colour}\"/>");
        text(&mut svg, (x + 18.0, 69.0), "small", words);
        x += 225.0;
    }
    let mut y = BARS[2];
    for group in shown {
        let label = escaped(&name(group));
        let (x, middle) = (BARS[0] - 10.0, y + 20.0);
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{middle}\" text-anchor=\"end\">{label}</text>");
        for ((value, colour), line) in figures(group).into_iter().zip(COLOURS).zip(0_u8..) {
            let (width, y) = ((BARS[1] - BARS[0]) * value / most, y + BAR * f64::from(line));
            let _ = writeln!(
                svg,
                "<rect x=\"{}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"{colour}\"/>",
                BARS[0]
            );
        }
        text(&mut svg, (BARS[1] + 8.0, middle), "small", &format!("{:.2}", group.whole_gpu_hours));
        y += GROUP;
    }
    let others = report.rows.len() - shown.len();
    if others > 0 {
        text(&mut svg, (20.0, y + 14.0), "small", &format!("and {others} more"));
    }
    svg.push_str("</svg>\n");
    svg
}
