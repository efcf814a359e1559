//! Frames of several sizes, and the effects of keys and the mouse.

use std::time::{Duration, Instant};

use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers, MouseButton, MouseEvent, MouseEventKind};
use ratatui::layout::Rect;

use super::draw::draw;
use super::fixture::{lease, look};
use super::rows::Skin;
use super::source::Look;
use super::view::{Body, Pane, Sort, View};
use sublet_core::ledger::LeaseState;
use sublet_core::share::Mode;

const UTF8: Skin = Skin { utf8: true, colour: true };
const ASCII: Skin = Skin { utf8: false, colour: false };

fn seen(look: Look) -> View {
    let mut view = View::default();
    view.take(Ok(look));
    view
}

fn shown(view: &mut View, width: u16, height: u16, skin: Skin) -> String {
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
    view.areas = draw(view, skin, Duration::from_secs(1), Instant::now(), &mut buffer);
    super::text_of(&buffer)
}

fn press(view: &mut View, keys: &str) {
    for key in keys.chars() {
        let code = match key {
            '\r' => KeyCode::Enter,
            '\t' => KeyCode::Tab,
            '\u{1b}' => KeyCode::Esc,
            '\u{8}' => KeyCode::Backspace,
            key => KeyCode::Char(key),
        };
        assert!(view.key(KeyEvent::new(code, KeyModifiers::NONE)), "it goes on");
    }
}

fn click(view: &mut View, column: u16, row: u16) {
    let kind = MouseEventKind::Down(MouseButton::Left);
    view.mouse(MouseEvent { kind, column, row, modifiers: KeyModifiers::NONE });
}

fn names(view: &View) -> Vec<String> {
    view.containers().iter().map(|lease| lease.id[15..].to_owned()).collect()
}

#[test]
fn every_size_has_a_picture() {
    let mut view = seen(look());
    for (width, height) in [(80, 24), (40, 10), (20, 5), (200, 50)] {
        insta::assert_snapshot!(format!("{width}x{height}"), shown(&mut view, width, height, UTF8));
    }
    insta::assert_snapshot!("80x24 without UTF-8", shown(&mut view, 80, 24, ASCII));
}

#[test]
fn details_have_a_picture() {
    let mut view = seen(look());
    press(&mut view, "\r");
    insta::assert_snapshot!("details of a container", shown(&mut view, 80, 40, UTF8));
    press(&mut view, "\u{1b}\t\r");
    insta::assert_snapshot!("details of a GPU", shown(&mut view, 80, 40, UTF8));
}

#[test]
fn details_of_a_drained_gpu_have_the_whole_reason() {
    let mut look = look();
    let words =
        "by alice since 2026-11-27T21:00:00Z until 2026-11-28T06:00:00Z: fans on the left are replaced";
    look.status.devices[0].drain = Some(words.to_owned());
    let mut view = seen(look);
    press(&mut view, "\t\r");
    let text = shown(&mut view, 80, 40, ASCII);
    let expected = "  drained    by alice since 2026-11-27T21:00:00Z until 2026-11-28T06:00:00Z:\n\
         \x20            fans on the left are replaced\n";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn a_mode_is_not_cut() {
    let mut look = look();
    (look.status.devices[0].mode, look.status.devices[0].drained) = ("time-slice", true);
    look.status.devices[1].health.state = "lost";
    (look.status.leases[0].mode, look.status.leases[0].own_server) = (Mode::TimeSlice, true);
    let mut view = seen(look);
    let narrow = shown(&mut view, 80, 24, ASCII);
    assert!(narrow.contains(" time-slice, drained ") && narrow.contains(" LOST "), "{narrow}");
    for width in 80..200 {
        let text = shown(&mut view, width, 24, ASCII);
        let own: Vec<_> = text.lines().filter(|line| line.starts_with("web ")).collect();
        assert!(
            own.iter().all(|row| !row.contains("time-slice") || row.contains("time-slice, own MPS")),
            "{text}"
        );
    }
}

#[test]
fn a_state_is_not_cut() {
    let mut look = look();
    look.status.leases[0].state = LeaseState::Suspended;
    look.status.leases[1].state = LeaseState::Suspending;
    let mut view = seen(look);
    for width in 80..220 {
        let text = shown(&mut view, width, 24, ASCII);
        let state = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        let has_column = text.contains(" STATE ");
        assert_eq!(state("web ").contains(" suspended "), has_column, "{text}");
        assert_eq!(state("training ").contains(" suspending "), has_column, "{text}");
        assert!(has_column || width < 200, "{text}");
    }
}

#[test]
fn nothing_is_too_small_and_no_terminal_gets_control_characters() {
    let mut view = seen(look());
    for keys in ["", "\r", "\u{1b}?", "\u{1b}/x"] {
        press(&mut view, keys);
        for (width, height) in (0..30).map(|size| (size, size)).chain([(500, 1), (1, 200)]) {
            let text = shown(&mut view, width, height, ASCII);
            assert!(text.is_ascii() && !text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        }
    }
    // Nothing has been seen yet.
    assert!(shown(&mut View::default(), 80, 24, ASCII).contains("looking for the driver"));
}

#[test]
fn five_hundred_leases_are_scrolled_and_the_cursor_stays_with_its_container() {
    let mut look = look();
    look.status.leases = (0..500).map(|number| lease(number, &format!("c{number:03}"), Some(1))).collect();
    let mut view = seen(look.clone());
    let first = shown(&mut view, 80, 24, UTF8);
    assert!(first.contains("c000") && !first.contains("c499"), "{first}");
    press(&mut view, "G");
    let last = shown(&mut view, 80, 24, UTF8);
    assert!(last.contains("c499") && !last.contains("c000"), "{last}");
    look.status.leases.rotate_left(7);
    look.status.leases[400].used.memory_bytes = Some(8 << 30);
    view.take(Ok(look));
    press(&mut view, "\r");
    assert!(shown(&mut view, 80, 24, UTF8).contains("Container c499"));
}

#[test]
fn containers_are_sorted_and_filtered() {
    let mut view = seen(look());
    assert_eq!(names(&view), ["2", "1", "3"], "memory against its limit; what is not known comes last");
    press(&mut view, "r");
    assert_eq!(names(&view), ["3", "1", "2"]);
    press(&mut view, "rss");
    assert_eq!((view.sort, names(&view)), (Sort::Name, vec!["3".to_owned(), "2".to_owned(), "1".to_owned()]));
    press(&mut view, "/WEX\u{8}");
    assert_eq!(names(&view), ["1"]);
    press(&mut view, "q\r");
    assert_eq!((names(&view).len(), view.typing), (0, false));
    assert!(shown(&mut view, 80, 24, UTF8).contains("No lease matches the filter."));
    press(&mut view, "\u{1b}");
    assert_eq!(names(&view).len(), 3);
}

#[test]
fn the_mouse_selects_opens_sorts_and_scrolls() {
    let mut view = seen(look());
    let text = shown(&mut view, 80, 24, UTF8);
    let line =
        |start: &str| u16::try_from(text.lines().position(|line| line.starts_with(start)).unwrap()).unwrap();
    click(&mut view, 3, line("web"));
    assert_eq!((view.body, view.selected(Pane::Containers)), (Body::Rows, 1));
    click(&mut view, 3, line("web"));
    assert_eq!(view.body, Body::Details);
    click(&mut view, 3, 23);
    assert_eq!(view.body, Body::Rows);
    click(&mut view, 0, line("CONTAINER"));
    assert_eq!((view.sort, view.reverse), (Sort::Name, false));
    click(&mut view, 0, line("CONTAINER"));
    assert_eq!((view.sort, view.reverse), (Sort::Name, true));
    click(&mut view, 3, line("1 "));
    assert_eq!((view.pane, view.selected(Pane::Gpus)), (Pane::Gpus, 1));
    click(&mut view, 300, 300);
}

#[test]
fn ended_leases_are_forgotten_and_a_failed_look_leaves_the_last_one() {
    let mut view = seen(look());
    press(&mut view, "\r");
    view.take(Err("no ledger\u{1b}".to_owned()));
    let text = shown(&mut view, 80, 24, UTF8);
    assert!(text.contains("what is below is old: no ledger\\u{1b}") && text.contains("training"), "{text}");
    let mut next = look();
    next.status.leases.clear();
    view.take(Ok(next));
    press(&mut view, "\u{1b}");
    assert!(shown(&mut view, 80, 24, UTF8).contains("No leases."));
}

#[test]
fn a_driver_that_hangs_is_said_to() {
    let mut view = seen(look());
    let mut buffer = Buffer::empty(Rect::new(0, 0, 80, 24));
    let later = Instant::now() + Duration::from_secs(60);
    view.areas = draw(&view, UTF8, Duration::from_secs(1), later, &mut buffer);
    assert!(super::text_of(&buffer).contains("60 s old: the driver does not answer"));
}
