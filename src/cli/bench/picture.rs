//! The picture of a result as SVG: one figure against the number of containers, a line for each mode.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::result::{BenchResult, Cell, Figure, Mode, digits, distinct};
use crate::svg::{COLOURS, begun, escaped, text};

const WIDTH: f64 = 930.0;
const HEIGHT: f64 = 500.0;
/// The plot: left, top, right, bottom.
const PLOT: [f64; 4] = [70.0, 70.0, 610.0, 420.0];

/// One line of the picture.
struct Line<'a> {
    mode: &'a Mode,
    by_hand: bool,
    /// Number of containers, value, and whether the cell is overcommitted; by number.
    points: Vec<(u32, f64, bool)>,
    /// The place of its mode among the modes of the load. It has the same colour and mark in the picture of each figure.
    index: usize,
}

/// The picture of one load. `None`: nothing of this figure was measured.
pub fn svg(result: &BenchResult, load: &str, figure: Figure) -> Option<String> {
    let lines = lines(result, load, figure);
    let points = || lines.iter().flat_map(|line| &line.points);
    let numbers: BTreeSet<u32> = points().map(|point| point.0).collect();
    let scale = Scale::new(*numbers.last()?, points().map(|point| point.1).fold(0.0, f64::max));
    let mut svg = begun((WIDTH, HEIGHT), &format!("{}: {}", result.title, figure.title()));
    axes(&mut svg, &scale, &numbers);
    let heading = match load {
        "command" | "http" => result.title.clone(),
        built_in => format!("{}: {built_in}", result.title),
    };
    text(&mut svg, (PLOT[0], 32.0), "title", &heading);
    let caption = format!("{}, against the number of containers at once", figure.title());
    text(&mut svg, (PLOT[0], 54.0), "small", &caption);
    for line in &lines {
        draw(&mut svg, &scale, line);
    }
    legend(&mut svg, &lines);
    text(&mut svg, (PLOT[0], HEIGHT - 32.0), "small", &below(result));
    if points().any(|point| point.2) {
        let why = "hollow: the shares come to more than the GPU has (overcommitted)";
        text(&mut svg, (PLOT[0], HEIGHT - 14.0), "small", why);
    }
    if result.simulated {
        text(&mut svg, (PLOT[0] + 40.0, 230.0), "huge", "SIMULATED");
    }
    if result.in_use_by_others {
        text(&mut svg, (PLOT[0] + 40.0, 290.0), "huge", "GPU IN USE BY OTHERS");
    }
    svg.push_str("</svg>\n");
    Some(svg)
}

/// Where and when it was measured.
fn below(result: &BenchResult) -> String {
    let driver = result.machine.driver.as_ref().map(|driver| format!("driver {driver}"));
    let date = result.time.get(..10).unwrap_or_default().to_owned();
    let parts = [Some(result.machine.gpu.clone()), driver, Some(date), result.source.clone()];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn lines<'a>(result: &'a BenchResult, load: &str, figure: Figure) -> Vec<Line<'a>> {
    let modes = distinct(result.of_load(load).map(|cell| &cell.mode));
    let line = |(mode, by_hand): (&'a Mode, bool)| {
        let its = result.of_load(load).filter(|cell| cell.mode == *mode && cell.by_hand == by_hand);
        let point = |cell: &Cell| {
            let value = figure.of(cell.measured.as_ref()?).filter(|value| value.is_finite());
            Some((cell.n, value?, cell.overcommitted))
        };
        let mut points: Vec<(u32, f64, bool)> = its.filter_map(point).collect();
        points.sort_by_key(|point| point.0);
        let index = modes.iter().position(|other| *other == mode).unwrap_or_default();
        Line { mode, by_hand, points, index }
    };
    let mut lines: Vec<Line<'a>> = result.lines(load).into_iter().map(line).collect();
    lines.retain(|line| !line.points.is_empty());
    // The legend stands in the order in which the lines end.
    let end = |line: &Line<'_>| line.points.last().map_or(0.0, |point| point.1);
    lines.sort_by(|one, other| end(other).total_cmp(&end(one)));
    lines
}

/// From values to places.
struct Scale {
    most: f64,
    step: f64,
    top: f64,
}

impl Scale {
    fn new(most: u32, highest: f64) -> Self {
        let highest = if highest > 0.0 { highest } else { 1.0 };
        let power = 10_f64.powf((highest / 5.0).log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].iter().map(|by| by * power).find(|step| step * 5.0 >= highest);
        let step = step.unwrap_or(highest);
        Self { most: f64::from(most.max(1)), step, top: step * (highest / step).ceil() }
    }

    fn x(&self, n: u32) -> f64 {
        PLOT[0] + (PLOT[2] - PLOT[0]) * f64::from(n) / self.most
    }

    fn y(&self, value: f64) -> f64 {
        PLOT[3] - (PLOT[3] - PLOT[1]) * value / self.top
    }
}

fn axes(svg: &mut String, scale: &Scale, numbers: &BTreeSet<u32>) {
    let mut value = 0.0;
    while value <= scale.top + scale.step / 2.0 {
        let y = scale.y(value);
        let _ = writeln!(svg, "<path class=\"grid\" d=\"M{} {y:.1}H{}\"/>", PLOT[0], PLOT[2]);
        let (x, y, label) = (PLOT[0] - 8.0, y + 5.0, short(value));
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{label}</text>");
        value += scale.step;
    }
    for n in numbers {
        let (x, y) = (scale.x(*n), PLOT[3] + 20.0);
        let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{n}</text>");
    }
}

/// Without needless zeros.
fn short(value: f64) -> String {
    format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn draw(svg: &mut String, scale: &Scale, line: &Line<'_>) {
    let place = |(n, value, _): &(u32, f64, bool)| format!("{:.1},{:.1}", scale.x(*n), scale.y(*value));
    let places = line.points.iter().map(place).collect::<Vec<_>>().join(" ");
    let (colour, dashes) = look(line);
    let _ = writeln!(svg, "<polyline class=\"line\" stroke=\"{colour}\" {dashes} points=\"{places}\"/>");
    for (n, value, overcommitted) in &line.points {
        mark(svg, (scale.x(*n), scale.y(*value)), line.index, *overcommitted);
    }
}

/// Colour and dashes of a line: beyond the colours, dashes tell lines apart.
fn look(line: &Line<'_>) -> (&'static str, &'static str) {
    let dashes = match (line.by_hand, line.index / 7 % 2) {
        (true, _) => "stroke-dasharray=\"2 4\"",
        (false, 0) => "",
        (false, _) => "stroke-dasharray=\"9 4\"",
    };
    (COLOURS[line.index % 7], dashes)
}

/// A circle, a square, a diamond or a triangle: shapes tell lines apart without colours.
fn mark(svg: &mut String, (x, y): (f64, f64), index: usize, hollow: bool) {
    let colour = COLOURS[index % 7];
    let fill = if hollow { "none" } else { colour };
    let shape = match index % 4 {
        0 => format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\""),
        1 => format!("<rect x=\"{:.1}\" y=\"{:.1}\" width=\"9\" height=\"9\"", x - 4.5, y - 4.5),
        2 => format!("<path d=\"M{x:.1} {:.1}l6 6l-6 6l-6 -6z\"", y - 6.0),
        _ => format!("<path d=\"M{x:.1} {:.1}l6 10h-12z\"", y - 6.0),
    };
    let _ = writeln!(svg, "{shape} class=\"mark\" stroke=\"{colour}\" fill=\"{fill}\"/>");
}

fn legend(svg: &mut String, lines: &[Line<'_>]) {
    let mut y = PLOT[1] + 6.0;
    let step = ((HEIGHT - 40.0 - y) / crate::shown::float(lines.len() as u64)).min(26.0);
    for line in lines {
        let (colour, dashes) = look(line);
        let x = PLOT[2] + 22.0;
        let _ = writeln!(svg, "<path class=\"line\" stroke=\"{colour}\" {dashes} d=\"M{x} {y}h28\"/>");
        mark(svg, (x + 14.0, y), line.index, false);
        let last = line.points.last().map(|(n, value, _)| format!(" ({} at {n})", digits(*value)));
        let words = line.mode.titled(line.by_hand) + &last.unwrap_or_default();
        text(svg, (x + 36.0, y + 5.0), "key", &words);
        y += step;
    }
}

/// No script, nothing from elsewhere.
const PAGE_HEAD: &str = "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
    <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
    <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><meta name=\"color-scheme\" content=\"light dark\">";
const PAGE_STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;margin:1rem auto;max-width:60rem;padding:0 1rem;overflow-wrap:anywhere;\
    background:#fff;color:#1a1a1a}svg{width:100%;min-width:38rem;height:auto;border-radius:6px}h2{margin-top:2rem}\
    .wide{overflow-x:auto}table{border-collapse:collapse;white-space:nowrap}\
    td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #8886}th:first-child,td:first-child{text-align:left}\
    .warn{font-weight:700;color:#a63d00}pre{overflow-x:auto;font-size:.8rem}\
    @media(prefers-color-scheme:dark){body{background:#0e1113;color:#e8e8e8}.warn{color:#ff9e66}}";

/// The page.
pub fn html(result: &BenchResult) -> serde_json::Result<String> {
    let title = escaped(&result.title);
    let mut page = format!(
        "{PAGE_HEAD}<title>{title}</title><style>{PAGE_STYLE}</style></head><body><h1>{title}</h1>\n"
    );
    let driver = result.machine.driver.as_deref().unwrap_or("unknown");
    let [gpu, driver, time] = [result.machine.gpu.as_str(), driver, &result.time].map(escaped);
    let _ = writeln!(page, "<p>{gpu}, driver {driver}, {time}. Measured by <code>sublet bench</code>.</p>");
    for (is, words) in [
        (result.simulated, "The driver is sublet's simulated one: these times mean nothing."),
        (result.in_use_by_others, "Other programs used the GPU during the measurement."),
    ] {
        if is {
            let _ = writeln!(page, "<p class=\"warn\">{words}</p>");
        }
    }
    for load in result.loads() {
        if result.loads().len() > 1 {
            let _ = writeln!(page, "<h2>{}</h2>", escaped(load));
        }
        for figure in Figure::ALL {
            if let Some(picture) = svg(result, load, figure) {
                let _ = writeln!(page, "<div class=\"wide\">{picture}</div>");
            }
        }
        table(&mut page, result.of_load(load));
    }
    let bare = serde_json::to_string_pretty(&BenchResult { cells: Vec::new(), ..result.clone() })?;
    // Line by line, because long texts are cut.
    let bare = bare.lines().map(escaped).collect::<Vec<_>>().join("\n");
    let _ = writeln!(page, "<h2>Settings and machine</h2><pre>{bare}</pre></body></html>");
    Ok(page)
}

fn table<'a>(page: &mut String, cells: impl Iterator<Item = &'a Cell>) {
    page.push_str("<div class=\"wide\"><table><tr><th>mode</th><th>containers</th>");
    for figure in Figure::ALL {
        let _ = write!(page, "<th>{}</th>", figure.title().split([',', ':']).next().unwrap_or_default());
    }
    page.push_str("<th></th></tr>\n");
    for cell in cells {
        let _ = write!(page, "<tr><td>{}</td><td>{}</td>", escaped(&cell.mode.titled(cell.by_hand)), cell.n);
        for figure in Figure::ALL {
            let value = cell.measured.as_ref().and_then(|measured| figure.of(measured));
            let _ = write!(page, "<td>{}</td>", value.map_or_else(|| "–".to_owned(), digits));
        }
        let mut notes: Vec<&str> = Vec::from_iter(cell.error.as_deref());
        notes.extend(cell.overcommitted.then_some("overcommitted"));
        let _ = writeln!(page, "<td>{}</td></tr>", escaped(&notes.join("; ")));
    }
    page.push_str("</table></div>\n");
}

#[cfg(test)]
mod tests {
    use crate::bench::fixture;

    use super::*;

    #[test]
    fn a_line_for_each_mode_and_a_mark_for_each_cell() {
        let result = fixture::result();
        let svg = svg(&result, "command", Figure::Mean).unwrap();
        assert_eq!(svg.matches("<polyline").count(), 4, "{svg}");
        // Ten cells, and one mark for each line in the legend.
        assert_eq!(svg.matches("class=\"mark\"").count(), 10 + 4);
        assert_eq!(svg.matches("fill=\"none\"/>").count(), 1, "one cell is overcommitted");
        assert!(svg.contains("hollow: ") && svg.contains("time-slice (54.9 at 7)"), "{svg}");
        assert!(svg.contains("stroke-dasharray=\"2 4\""), "by hand");
        // The colour of the last mark before a name in the legend.
        let colour = |figure, name: &str| {
            let svg = super::svg(&result, "command", figure).unwrap();
            let before = svg.split(name).next().unwrap().rsplit("stroke=\"").next().unwrap();
            before.split('"').next().unwrap().to_owned()
        };
        for (name, its) in [("MPS (", "#d55e00"), ("time-slice (", "#0072b2")] {
            let both = [Figure::Mean, Figure::Throughput].map(|figure| colour(figure, name));
            assert_eq!(both, [its, its], "{name}: whatever the order of the lines");
        }
        assert!(!svg.contains("SIMULATED"));
        assert!(super::svg(&result, "command", Figure::Energy).is_none());
        assert!(super::svg(&result, "none", Figure::Mean).is_none());
    }

    #[test]
    fn it_is_xml_whatever_the_strings_hold() {
        let mut result = fixture::result();
        result.simulated = true;
        result.title = "</svg><script>\"&'\u{1b}[2J".to_owned();
        let svg = svg(&result, "command", Figure::Mean).unwrap();
        assert!(
            svg.contains("&lt;/svg&gt;&lt;script&gt;&quot;&amp;&#39;\u{fffd}[2J")
                && svg.contains("SIMULATED")
        );
        assert!(!svg.contains("<script"));
    }

    #[test]
    fn the_scale_has_round_steps() {
        let scale = |highest| (Scale::new(7, highest).step, Scale::new(7, highest).top);
        assert_eq!(scale(54.9), (20.0, 60.0));
        assert_eq!(scale(1.0), (0.2, 1.0));
        assert_eq!(scale(0.0), (0.2, 1.0));
        assert_eq!([0.2, 20.0, 2.5].map(short), ["0.2", "20", "2.5"]);
    }

    #[test]
    fn the_page_holds_everything_and_no_script() {
        let mut result = fixture::result();
        result.title = "<script>x</script>".to_owned();
        result.cells[0].error = Some("why".to_owned());
        let page = html(&result).unwrap();
        assert_eq!(page.matches("<svg").count(), 4, "mean, p99, throughput and fairness are known");
        assert!(page.contains("54.9") && page.contains("why") && page.contains("overcommitted"));
        assert!(!page.contains("<script") && page.contains("default-src 'none'"));
    }
}
