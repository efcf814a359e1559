//! The picture of a result as PNG, drawn from the SVG with a font of our own: hosts with a GPU often have none.

use std::sync::Arc;

use resvg::usvg::{self, fontdb};
use resvg::{render, tiny_skia};

/// `DejaVu` Sans with the letters of Latin, Greek and Cyrillic. Others become empty boxes.
static FONT: &[u8] = include_bytes!("font/DejaVuSans.ttf");
const FAMILY: &str = "DejaVu Sans";

/// Pixels for one unit of the SVG: sharp on screens and slides.
const SCALE: f32 = 2.0;

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
pub enum PngError {
    /// The SVG is not what the library takes.
    #[error("the picture cannot be drawn: {0}")]
    Svg(#[from] usvg::Error),
    /// There is no memory for its pixels, or it has none.
    #[error("a picture of {0} x {1} pixels cannot be made")]
    Size(u32, u32),
    /// The PNG cannot be encoded.
    #[error("the picture cannot be encoded: {0}")]
    Encoding(String),
}

/// What [`super::svg`] made, in its light colours and on its own background.
pub fn png(svg: &str) -> Result<Vec<u8>, PngError> {
    let mut fonts = fontdb::Database::new();
    fonts.load_font_source(fontdb::Source::Binary(Arc::new(FONT)));
    fonts.set_sans_serif_family(FAMILY);
    let options =
        usvg::Options { font_family: FAMILY.to_owned(), fontdb: Arc::new(fonts), ..usvg::Options::default() };
    let tree = usvg::Tree::from_str(svg, &options)?;
    let size = tree.size().to_int_size().scale_by(SCALE);
    let (width, height) = size.map_or((0, 0), |size| (size.width(), size.height()));
    let mut pixels = tiny_skia::Pixmap::new(width, height).ok_or(PngError::Size(width, height))?;
    render(&tree, tiny_skia::Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
    pixels.encode_png().map_err(|error| PngError::Encoding(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Figure, fixture, svg};

    fn pixels(svg: &str) -> tiny_skia::Pixmap {
        tiny_skia::Pixmap::decode_png(&png(svg).unwrap()).unwrap()
    }

    /// How many pixels have this colour.
    fn count(pixels: &tiny_skia::Pixmap, [red, green, blue]: [u8; 3]) -> usize {
        let is = |pixel: &&tiny_skia::PremultipliedColorU8| {
            [pixel.red(), pixel.green(), pixel.blue(), pixel.alpha()] == [red, green, blue, 255]
        };
        pixels.pixels().iter().filter(is).count()
    }

    #[test]
    fn lines_and_words_are_drawn_on_white() {
        let mut result = fixture::result();
        let picture = pixels(&svg(&result, "command", Figure::Mean).unwrap());
        assert_eq!((picture.width(), picture.height()), (1860, 1000));
        assert!(picture.pixels().iter().all(|pixel| pixel.alpha() == 255));
        assert!(count(&picture, [255; 3]) > 1_000_000, "the background");
        for colour in [[0x00, 0x72, 0xb2], [0xd5, 0x5e, 0x00], [0x00, 0x9e, 0x73]] {
            assert!(count(&picture, colour) > 500, "{colour:?}");
        }
        // The title is the only text that changes.
        let words = count(&picture, [0x1a; 3]);
        result.title = "Ω Ж é".repeat(8);
        let more = pixels(&svg(&result, "command", Figure::Mean).unwrap());
        assert!(words > 2_000 && count(&more, [0x1a; 3]) != words);
    }

    #[test]
    fn what_is_no_picture_is_refused() {
        assert!(matches!(png("no picture"), Err(PngError::Svg(_))));
    }
}
