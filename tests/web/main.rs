//! The page of `sublet top --web` and of `sublet bench`, in a headless Chromium.

mod bench_page;
mod page;
