//! Short connections by the thousand. Also part of the program that makes them in guests (`programs/visits.rs`), and
//! so of std alone.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// Asks a web server for its first page, on a connection of its own.
///
/// # Errors
/// It cannot be reached, or says nothing for long.
pub fn visit(server: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect(server)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    let body = reply.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
    body.ok_or_else(|| io::Error::other(format!("half a reply: {reply}")))
}

/// Visits so often; how many visits found `page`.
pub fn visits(server: SocketAddr, page: &str, count: u32) -> u32 {
    let found = |number: &u32| match visit(server) {
        Ok(body) if body == page => true,
        other => {
            eprintln!("visit {number}: {other:?}");
            false
        }
    };
    (0..count).filter(found).count() as u32
}

/// A web server of one page, which closes each connection after it.
///
/// # Errors
/// No connection can be accepted any more.
pub fn serve(listener: &TcpListener, page: &str) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        // A visitor that hangs up early is counted by itself.
        let _ = serve_one(stream, page);
    }
}

fn serve_one(mut stream: TcpStream, page: &str) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let (mut request, mut piece) = (Vec::new(), [0; 512]);
    while !request.ends_with(b"\r\n\r\n") {
        match stream.read(&mut piece)? {
            0 => return Ok(()),
            count => request.extend_from_slice(&piece[..count]),
        }
    }
    let len = page.len();
    write!(stream, "HTTP/1.0 200 OK\r\nContent-Length: {len}\r\n\r\n{page}")
}
