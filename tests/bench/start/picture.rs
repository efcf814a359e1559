//! The picture of the result as SVG: for whole containers, a bar for each row, with its ratio to the bare one.

use std::fmt::Write as _;

use crate::report::{Facts, base_of};
use crate::rows::Group;

/// Of Okabe and Ito, as in the pictures of `sublet bench`: the bare part of a bar, and what comes on top.
const BARE: &str = "#56b4e9";
const MORE: &str = "#d55e00";

const STYLE: &str = ".back{fill:#fff}svg{color:#1a1a1a}text{fill:currentColor;font:13px system-ui,sans-serif}\
    .title{font-size:19px;font-weight:600}.name{font-weight:600}.small{font-size:12px;opacity:.8}\
    @media(prefers-color-scheme:dark){.back{fill:#14171a}svg{color:#e8e8e8}}";

/// Where the bars begin, and how long the longest is.
const LEFT: f64 = 390.0;
const LONGEST: f64 = 400.0;
const STEP: f64 = 24.0;

/// Groups of whole containers, each with a scale of its own.
pub fn svg(facts: &Facts, groups: &[Group]) -> String {
    let shown: Vec<&Group> = groups.iter().filter(|group| group.rows[0].what.starts_with("bare")).collect();
    let lines: usize = shown.iter().map(|group| group.rows.len() + 2).sum();
    #[expect(clippy::cast_precision_loss, reason = "some dozens of lines")]
    let height = 80.0 + STEP * lines as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 930 {height:.0}\" role=\"img\">\
         <title>What sublet adds to a container's start</title><style>{STYLE}</style>\
         <rect class=\"back\" width=\"100%\" height=\"100%\"/>\n\
         <text class=\"title\" x=\"20\" y=\"32\">What sublet adds to a container's life, milliseconds</text>\n\
         <text class=\"small\" x=\"20\" y=\"54\">{}; medians of {} rounds in turns</text>\n",
        escaped(&format!("{}; {}, {} cores", facts.gpu, facts.runtime, facts.cores)),
        facts.cycles
    );
    let mut y = 80.0;
    for group in shown {
        y = bars(&mut svg, group, y);
    }
    svg.push_str("</svg>\n");
    svg
}

/// Returns where the next group begins.
fn bars(svg: &mut String, group: &Group, top: f64) -> f64 {
    let longest = group.rows.iter().map(crate::rows::Row::median).fold(0.0, f64::max);
    let scale = LONGEST / longest;
    let mut y = top + STEP;
    let _ =
        writeln!(svg, "<text class=\"name\" x=\"20\" y=\"{:.0}\">{}</text>", y - 8.0, escaped(group.title));
    for row in &group.rows {
        let (median, base) = (row.median(), base_of(group, row).median());
        let (below, above) = (median.min(base) * scale, (median - base).max(0.0) * scale);
        let _ = writeln!(
            svg,
            "<text x=\"36\" y=\"{text:.0}\">{what}</text>\
             <rect x=\"{LEFT}\" y=\"{y:.0}\" width=\"{below:.1}\" height=\"17\" fill=\"{BARE}\"/>\
             <rect x=\"{middle:.1}\" y=\"{y:.0}\" width=\"{above:.1}\" height=\"17\" fill=\"{MORE}\"/>\
             <text x=\"{end:.1}\" y=\"{text:.0}\">{median:.1} ({ratio:.2})</text>",
            text = y + 13.0,
            what = escaped(&row.what),
            middle = LEFT + below,
            end = LEFT + below + above + 8.0,
            ratio = median / base,
        );
        y += STEP;
    }
    y + STEP / 2.0
}

/// For text of SVG; backticks are Markdown's.
fn escaped(words: &str) -> String {
    words.replace('`', "").replace('&', "&amp;").replace('<', "&lt;")
}
