//! The picture of docs/pictures/fleet.svg: a panel for each mix, a line for each way.

use std::fmt::Write as _;

use crate::node::Way;
use crate::{LOADS, Panel, tenths};

/// Width and height of a panel's plot, and the distance between two panels.
const PLOT: (u64, u64) = (380, 200);
const STEP: (u64, u64) = (450, 270);
/// The first plot's left and top.
const ORIGIN: (u64, u64) = (60, 100);

/// Of Okabe and Ito, as in the pictures of `sublet bench`. Dashes tell the lines apart without colours.
const fn look(way: Way) -> (&'static str, &'static str) {
    match way {
        Way::Whole => ("currentColor", "2 3"),
        Way::Mig => ("#e69f00", "9 4"),
        Way::Binpack => ("#0072b2", "none"),
        Way::Spread => ("#d55e00", "5 3"),
    }
}

const STYLE: &str = ".back{fill:#fff}svg{color:#1a1a1a}text{fill:currentColor;font:13px system-ui,sans-serif}\
    .title{font-size:19px;font-weight:600}.name{font-weight:600}.grid{stroke:#8888;stroke-width:.5}\
    .line{fill:none;stroke-width:2.5}@media(prefers-color-scheme:dark){.back{fill:#14171a}svg{color:#e8e8e8}}";

/// All panels.
pub fn svg(panels: &[Panel]) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 930 640\" role=\"img\">\
         <title>How full a fleet gets</title><style>{STYLE}</style>\
         <rect class=\"back\" width=\"100%\" height=\"100%\"/>\n\
         <text class=\"title\" x=\"60\" y=\"32\">SMs asked for by running jobs, % of the fleet's, against the load that arrives</text>\n"
    );
    for (nth, way) in (0_u64..).zip(Way::ALL) {
        let (colour, dashes) = look(way);
        let x = ORIGIN.0 + nth * 200;
        let _ = writeln!(
            svg,
            "<path class=\"line\" stroke=\"{colour}\" stroke-dasharray=\"{dashes}\" d=\"M{x} 56h34\"/>\
             <text x=\"{}\" y=\"61\">{}</text>",
            x + 42,
            way.title()
        );
    }
    for (nth, panel) in (0_u64..).zip(panels) {
        draw(&mut svg, panel, (ORIGIN.0 + nth % 2 * STEP.0, ORIGIN.1 + nth / 2 * STEP.1));
    }
    svg.push_str("</svg>\n");
    svg
}

/// One panel, whose plot begins at `left` and `top`.
fn draw(svg: &mut String, panel: &Panel, (left, top): (u64, u64)) {
    let bottom = top + PLOT.1;
    let x =
        |load: u32| left + u64::from(load - LOADS[0]) * PLOT.0 / u64::from(LOADS[LOADS.len() - 1] - LOADS[0]);
    // In tenths of a unit.
    let y = |used: u64| bottom * 10 - used * PLOT.1 / 100;
    let _ = writeln!(svg, "<text class=\"name\" x=\"{left}\" y=\"{}\">{}</text>", top - 10, panel.mix.name);
    for percent in [0, 25, 50, 75, 100] {
        let at = tenths(y(percent * 10));
        let _ = writeln!(
            svg,
            "<path class=\"grid\" d=\"M{left} {at}h{}\"/><text x=\"{}\" y=\"{}\" text-anchor=\"end\">{percent}</text>",
            PLOT.0,
            left - 8,
            tenths(y(percent * 10) + 45)
        );
    }
    for load in LOADS {
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{load} %</text>",
            x(load),
            bottom + 20
        );
    }
    for (way, outcomes) in &panel.lines {
        let (colour, dashes) = look(*way);
        let point =
            |(load, one): (u32, &crate::Outcome)| format!("{},{}", x(load), tenths(y(one.used_tenths)));
        let points: Vec<String> = LOADS.into_iter().zip(outcomes).map(point).collect();
        let _ = writeln!(
            svg,
            "<polyline class=\"line\" stroke=\"{colour}\" stroke-dasharray=\"{dashes}\" points=\"{}\"/>",
            points.join(" ")
        );
    }
}
