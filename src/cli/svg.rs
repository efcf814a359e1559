//! What pictures as SVG have in common: colours, a style for light and dark, and texts of any kind.

use std::fmt::Write as _;

/// Okabe and Ito's colours, which people with any kind of colour vision tell apart; yellow is left out, because it cannot
/// be seen on white. The black is the text's colour.
pub const COLOURS: [&str; 7] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "currentColor"];

/// Light, and dark where the reader's system is. Programs without CSS media queries show the light one. In an HTML page it
/// is the whole page's, hence `svg` everywhere.
const STYLE: &str = "svg .back{fill:#fff}svg{color:#1a1a1a}svg text{fill:currentColor;font:14px system-ui,sans-serif}\
    svg .title{font-size:19px;font-weight:600}svg .small{font-size:12px;opacity:.8}svg .grid{stroke:#8888;stroke-width:.5}\
    svg .line{fill:none;stroke-width:2.5}svg .mark{stroke-width:2}svg .huge{font-size:40px;font-weight:700;opacity:.25}\
    @media(prefers-color-scheme:dark){svg .back{fill:#14171a}svg{color:#e8e8e8}}";

/// The beginning of a picture of this width and height; `</svg>` ends it.
pub fn begun((width, height): (f64, f64), title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\">\
         <title>{}</title><style>{STYLE}</style><rect class=\"back\" width=\"100%\" height=\"100%\"/>\n",
        escaped(title)
    )
}

/// Adds a text; `class` is one of the style's.
pub fn text(svg: &mut String, (x, y): (f64, f64), class: &str, words: &str) {
    let _ = writeln!(svg, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{}</text>", escaped(words));
}

/// For XML and HTML, whatever it holds. Control characters are in neither.
pub fn escaped(words: &str) -> String {
    let escape = |character: char| match character {
        '&' => "&amp;".to_owned(),
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '"' => "&quot;".to_owned(),
        '\'' => "&#39;".to_owned(),
        other if other.is_control() || matches!(other, '\u{fffe}' | '\u{ffff}') => "\u{fffd}".to_owned(),
        other => other.to_string(),
    };
    words.chars().take(200).map(escape).collect()
}
