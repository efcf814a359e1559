//! A report as a picture: bars for each group, those with the most GPU-hours.

use std::fmt::Write as _;

use super::report::{Group, Report};
use crate::shown::float;
use crate::svg::{COLOURS, begun, escaped, text};
use crate::terminal::wrapped;

/// More groups than these would not fit on a page.
const MOST: usize = 20;

const WIDTH: f64 = 930.0;
/// Where bars begin and end, and where the first one stands.
const BARS: [f64; 3] = [250.0, 850.0, 100.0];
/// The height of a group, and of a bar in it.
const GROUP: f64 = 44.0;
const BAR: f64 = 8.0;

/// The height of a line below the groups, and how many characters it has at most.
const LINE: f64 = 18.0;
const LONGEST: usize = 130;

/// What the bars of a group are.
const FIGURES: [&str; 4] = [
    "held, each GPU whole",
    "by the share of the SMs",
    "by the share of the memory",
    "used, as the driver tells",
];

/// The picture; `name` is what people call a group. `notes` stand below the groups.
pub fn svg(report: &Report, name: &dyn Fn(&Group) -> String, notes: &[String]) -> String {
    let shown = &report.rows[..report.rows.len().min(MOST)];
    let figures = |group: &Group| {
        let Group { whole_gpu_hours, sm_gpu_hours, memory_gpu_hours, used_gpu_hours, .. } = *group;
        [whole_gpu_hours, sm_gpu_hours, memory_gpu_hours, used_gpu_hours.unwrap_or_default()]
    };
    let most = shown.iter().flat_map(figures).fold(0.001, f64::max);
    let bottom = BARS[2] + GROUP * float(shown.len() as u64) + 30.0;
    let notes = wrapped(&notes.join("\n"), Some(LONGEST));
    let height = bottom + LINE * float(notes.lines().count() as u64);
    let title = format!("GPU-hours from {} to {}", report.since, report.until);
    let mut svg = begun((WIDTH, height), &title);
    text(&mut svg, (20.0, 36.0), "title", &title);
    for ((words, colour), at) in FIGURES.iter().zip(COLOURS).zip(0_u8..) {
        let x = 20.0 + 225.0 * f64::from(at);
        let _ = writeln!(svg, "<rect x=\"{x}\" y=\"58\" width=\"12\" height=\"12\" fill=\"{colour}\"/>");
        text(&mut svg, (x + 18.0, 69.0), "small", words);
    }
    for (group, at) in shown.iter().zip(0_u8..) {
        let (left, top) = (BARS[0], BARS[2] + GROUP * f64::from(at));
        let (x, middle, label) = (left - 10.0, top + 20.0, escaped(&name(group)));
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{middle}\" text-anchor=\"end\">{label}</text>");
        for ((value, colour), line) in figures(group).into_iter().zip(COLOURS).zip(0_u8..) {
            let (width, y) = ((BARS[1] - left) * value / most, top + BAR * f64::from(line));
            let shape = format!("x=\"{left}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BAR}\"");
            let _ = writeln!(svg, "<rect {shape} fill=\"{colour}\"/>");
        }
        text(&mut svg, (BARS[1] + 8.0, middle), "small", &format!("{:.2}", group.whole_gpu_hours));
    }
    let more = report.rows.len() - shown.len();
    let more = if more > 0 { format!("and {more} more") } else { String::new() };
    text(&mut svg, (20.0, bottom - 16.0), "small", &more);
    for (note, at) in notes.lines().zip(0_u8..) {
        text(&mut svg, (20.0, bottom + LINE * f64::from(at)), "small", note);
    }
    svg.push_str("</svg>\n");
    svg
}
