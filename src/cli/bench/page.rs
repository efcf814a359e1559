//! A result as one page that needs nothing else: pictures, all figures, and what repeats it.

use std::fmt::Write as _;

use super::figure::{Figure, digits};
use super::picture::{escaped, svg};
use super::result::{BenchResult, Cell};

/// No script, nothing from elsewhere.
const HEAD: &str = "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
    <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
    <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><meta name=\"color-scheme\" content=\"light dark\">";
const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;margin:1rem auto;max-width:60rem;padding:0 1rem;overflow-wrap:anywhere;\
    background:#fff;color:#1a1a1a}svg{width:100%;min-width:38rem;height:auto;border-radius:6px}h2{margin-top:2rem}\
    .wide{overflow-x:auto}table{border-collapse:collapse;white-space:nowrap}\
    td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #8886}th:first-child,td:first-child{text-align:left}\
    .warn{font-weight:700;color:#a63d00}pre{overflow-x:auto;font-size:.8rem}\
    @media(prefers-color-scheme:dark){body{background:#0e1113;color:#e8e8e8}.warn{color:#ff9e66}}";

/// The page.
pub fn html(result: &BenchResult) -> serde_json::Result<String> {
    let title = escaped(&result.title);
    let mut page =
        format!("{HEAD}<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>\n");
    let machine = &result.machine;
    let driver = machine.driver.as_deref().unwrap_or("unknown");
    let _ = writeln!(
        page,
        "<p>{}, driver {}, {}. Measured by <code>sublet bench</code>.</p>",
        escaped(&machine.gpu),
        escaped(driver),
        escaped(&result.time)
    );
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
        table(&mut page, result.cells.iter().filter(|cell| cell.load == load));
    }
    let bare = BenchResult { cells: Vec::new(), ..result.clone() };
    let _ = writeln!(
        page,
        "<h2>Settings and machine</h2><pre>{}</pre></body></html>",
        whole(&serde_json::to_string_pretty(&bare)?)
    );
    Ok(page)
}

/// [`escaped`] line by line, because that cuts long texts.
fn whole(text: &str) -> String {
    text.lines().map(escaped).collect::<Vec<_>>().join("\n")
}

fn table<'a>(page: &mut String, cells: impl Iterator<Item = &'a Cell>) {
    page.push_str("<div class=\"wide\"><table><tr><th>mode</th><th>containers</th>");
    for figure in Figure::ALL {
        let _ = write!(page, "<th>{}</th>", figure.title().split([',', ':']).next().unwrap_or_default());
    }
    page.push_str("<th></th></tr>\n");
    for cell in cells {
        let by_hand = if cell.by_hand { ", by hand" } else { "" };
        let _ = write!(page, "<tr><td>{}{by_hand}</td><td>{}</td>", escaped(&cell.mode.title()), cell.n);
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
    use super::*;
    use crate::bench::fixture;

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
