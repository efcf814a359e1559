//! A client of `sublet serve`'s socket, well behaved or not: it sends the given lines, or holds connections open.
//! The tests run it as other users.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words.as_slice() {
        [socket] => say(socket),
        [socket, "hold", count] => hold(socket, count.parse()?, false),
        [socket, "drip", count] => hold(socket, count.parse()?, true),
        [socket, "hang", count] => hang(socket, count.parse()?),
        _ => anyhow::bail!("usage: speak SOCKET [hold|drip|hang COUNT]"),
    }
}

/// Sends each line of standard input and prints the answer.
fn say(socket: &str) -> anyhow::Result<()> {
    let mut answers = BufReader::new(UnixStream::connect(socket)?);
    for line in std::io::stdin().lines() {
        // A line that the service does not read to its end is answered all the same.
        let _ = writeln!(answers.get_mut(), "{}", line?);
        let mut answer = String::new();
        answers.read_line(&mut answer)?;
        print!("{answer}");
    }
    Ok(())
}

/// Opens `count` connections, prints how many were turned away, and holds the others until standard input
/// ends; with `drip`, one of them sends a byte a second.
fn hold(socket: &str, count: usize, drip: bool) -> anyhow::Result<()> {
    let mut open = (0..count).map(|_| UnixStream::connect(socket)).collect::<Result<Vec<_>, _>>()?;
    std::thread::sleep(Duration::from_millis(300));
    let mut turned_away = Vec::new();
    for stream in &mut open {
        stream.set_nonblocking(true)?;
        let mut line = String::new();
        let _ = stream.read_to_string(&mut line);
        stream.set_nonblocking(false)?;
        turned_away.extend((!line.is_empty()).then_some(line));
    }
    println!("{}", turned_away.len());
    print!("{}", turned_away.first().map_or("", String::as_str));
    std::io::stdout().flush()?;
    if drip {
        std::thread::spawn(move || {
            // A closed connection is opened again, because the test needs some that hang.
            for byte in b"{\"v\":1,\"do\":\"".iter().cycle() {
                if open.first_mut().is_some_and(|stream| stream.write_all(&[*byte]).is_err()) {
                    break;
                }
                std::thread::sleep(Duration::from_secs(1));
            }
            std::thread::sleep(Duration::from_secs(3600));
            drop(open);
        });
        std::io::stdin().lines().for_each(drop);
    } else {
        std::io::stdin().lines().for_each(drop);
        drop(open);
    }
    Ok(())
}

/// Holds `count` connections until it is killed. A closed connection is opened again.
fn hang(socket: &str, count: usize) -> anyhow::Result<()> {
    let mut open = (0..count).map(|_| UnixStream::connect(socket)).collect::<Result<Vec<_>, _>>()?;
    println!("0");
    std::io::stdout().flush()?;
    loop {
        let mut fds: Vec<_> =
            open.iter().map(|stream| PollFd::new(stream.as_fd(), PollFlags::POLLIN)).collect();
        poll(&mut fds, PollTimeout::NONE)?;
        let closed: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        for (stream, _) in open.iter_mut().zip(closed).filter(|(_, closed)| *closed) {
            *stream = UnixStream::connect(socket)?;
        }
    }
}
