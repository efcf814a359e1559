//! A server on real sockets: its answers, its refusals, and clients that are slow.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use super::{Listener, Request, Response, Server, Token, bind};

const LONG: usize = 32 << 20;

fn answer(request: &Request) -> Response {
    match request.path.as_str() {
        "/" => {
            let text = format!("{:?}", request.named("ACCEPT").next());
            Response::ok("text/plain", text.into_bytes())
        }
        "/long" => Response::ok("text/plain", vec![b'x'; LONG]),
        _ => Response::error("404 Not Found: no such page"),
    }
}

fn started(token: Option<Token>) -> SocketAddr {
    let listener = bind(([127, 0, 0, 1], 0).into(), false, "--open").unwrap();
    let address = listener.local_addr().unwrap();
    let names = vec!["gpu.example".to_owned()];
    Server { listener: Listener::Tcp(listener), names, token }.start(answer).unwrap();
    address
}

fn ask(address: SocketAddr, text: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn get(address: SocketAddr, path: &str) -> String {
    ask(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n"))
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default()
}

#[test]
fn a_request_is_answered_with_strict_headers() {
    let address = started(None);
    let request = format!("GET /?a=1&b HTTP/1.1\r\nHost: {address}\r\naccept: x/y\r\n\r\n");
    let answer = ask(address, &request);
    assert_eq!(status(&answer), 200);
    assert!(answer.ends_with("\r\n\r\nSome(\"x/y\")"), "{answer}");
    let policy = "Content-Security-Policy: default-src 'none'; ";
    let strict = [policy, "Cache-Control: no-store", "X-Content-Type-Options: nosniff", "Connection: close"];
    assert!(strict.iter().all(|header| answer.contains(header)), "{answer}");
    let head = ask(address, &request.replace("GET", "HEAD"));
    assert!(head.ends_with("\r\n\r\n") && head.contains("Content-Length: 11\r\n"), "{head}");
    assert_eq!(status(&get(address, "/elsewhere")), 404);
}

#[test]
fn only_reading_is_served_and_no_body_is_read() {
    let address = started(None);
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE"] {
        let refused = ask(address, &format!("{method} / HTTP/1.1\r\nHost: {address}\r\n\r\n"));
        assert!(status(&refused) == 405 && refused.contains("Allow: GET, HEAD\r\n"), "{refused}");
    }
    let with =
        |lines: &str| status(&ask(address, &format!("GET / HTTP/1.1\r\nHost: {address}\r\n{lines}\r\n")));
    assert_eq!(with("Content-Length: 5\r\n"), 413);
    assert_eq!(with("Transfer-Encoding: chunked\r\n"), 413);
    assert_eq!(with("Content-Length: 0\r\n"), 200);
    assert_eq!(with(&format!("X: {}\r\n", "x".repeat(9000))), 431);
    assert_eq!(with(&"X: y\r\n".repeat(65)), 431);
    assert_eq!(with("X: \u{1}\r\n"), 400);
    assert_eq!(status(&ask(address, "nonsense\r\n\r\n")), 400);
    assert_eq!(status(&ask(address, &"x".repeat(9000))), 431);
    let absolute = format!("GET http://{address}/ HTTP/1.1\r\nHost: {address}\r\n\r\n");
    assert_eq!(status(&ask(address, &absolute)), 400);
}

#[test]
fn a_name_that_is_not_of_this_host_is_refused() {
    let address = started(None);
    let host = |host: &str| status(&ask(address, &format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n")));
    for permitted in ["localhost", "LocalHost:1", "127.0.0.1:9", "[::1]:80", "[::1]", "gpu.example:80"] {
        assert_eq!(host(permitted), 200, "{permitted}");
    }
    for foreign in [
        "evil.example",
        "localhost.evil.example",
        "192.0.2.1",
        "127.0.0.1:x",
        "",
        "[::1",
        "localhost@evil",
        "::1",
    ] {
        assert_eq!(host(foreign), 421, "{foreign}");
    }
    assert_eq!(status(&ask(address, "GET / HTTP/1.1\r\n\r\n")), 400);
    assert_eq!(status(&ask(address, "GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n")), 400);
}

#[test]
fn without_the_token_there_is_no_page() {
    let token = Token::new().unwrap();
    assert_ne!(token.as_str(), Token::new().unwrap().as_str());
    let (address, right) = (started(Some(token.clone())), token.as_str());
    assert_eq!(status(&get(address, &format!("/{right}/"))), 200);
    let wrong = format!("{}{}", if right.starts_with('0') { '1' } else { '0' }, &right[1..]);
    for path in [
        "/".to_owned(),
        format!("/{wrong}/"),
        format!("/{right}"),
        format!("/{right}0/"),
        format!("//{right}/"),
    ] {
        assert_eq!(status(&get(address, &path)), 404, "{path}");
    }
    assert_eq!(status(&get(address, &format!("/{}é/", &right[..31]))), 404, "not at a character's beginning");
}

#[test]
fn a_slow_client_is_cut_off_and_does_not_keep_the_next_one_out() {
    let address = started(None);
    let began = Instant::now();
    let slow = thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        while stream.write_all(b"G").is_ok() && began.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(500));
        }
        began.elapsed()
    });
    // It sends its request and never reads the answer.
    let mut deaf = TcpStream::connect(address).unwrap();
    deaf.write_all(format!("GET /long HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes()).unwrap();
    assert_eq!(status(&get(address, "/")), 200);
    assert!(began.elapsed() < Duration::from_secs(3));
    assert!(slow.join().unwrap() < Duration::from_secs(10));
    thread::sleep(Duration::from_secs(1));
    let mut answer = Vec::new();
    drop(deaf.read_to_end(&mut answer));
    assert!(answer.len() < LONG, "the rest was given up");
}

#[test]
fn more_connections_than_threads_are_all_answered() {
    let address = started(None);
    let idle: Vec<_> = (0..31).map(|_| TcpStream::connect(address).unwrap()).collect();
    let clients: Vec<_> = (0..40).map(|_| thread::spawn(move || status(&get(address, "/")))).collect();
    assert!(clients.into_iter().all(|client| client.join().unwrap() == 200));
    drop(idle);
}

#[test]
fn a_unix_socket_has_no_names() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = Listener::Unix(UnixListener::bind(&path).unwrap());
    Server { listener, names: Vec::new(), token: None }.start(answer).unwrap();
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: any\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(status(&text), 200);
}

#[test]
fn an_address_that_cannot_be_used_is_explained() {
    let address = started(None);
    let error = bind(address, false, "--open").unwrap_err().to_string();
    assert!(
        error.contains(&address.to_string()) && error.contains("another program listens there"),
        "{error}"
    );
    let everywhere = ([0, 0, 0, 0], 0).into();
    let error = bind(everywhere, false, "--open").unwrap_err().to_string();
    assert!(error.contains("is not a loopback address") && error.contains("--open"), "{error}");
    bind(everywhere, true, "--open").unwrap();
}
