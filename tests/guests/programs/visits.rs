//! A program of the guest: `visits ADDRESS PAGE COUNT` visits a web server on so many connections, one after the other;
//! `visits serve PORT PAGE` is a web server; `visits echo PORT` sends datagrams back to whom they are from.

#[path = "../src/visits.rs"]
mod visits;

use std::{
    env::args,
    io,
    net::{TcpListener, UdpSocket},
};

fn main() {
    let words: Vec<_> = args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["echo", port] => echo(port.parse().expect("a port")).expect("datagrams"),
        ["serve", port, page] => serve(port.parse().expect("a port"), page).expect("visitors"),
        [server, page, count] => {
            let server = server.parse().expect("an address and a port");
            let found = visits::visits(server, page, count.parse().expect("a number"));
            println!("{found} of {count} visits");
        }
        _ => eprintln!("visits: see its source"),
    }
}

fn serve(port: u16, page: &str) -> io::Result<()> {
    visits::serve(&TcpListener::bind(("0.0.0.0", port))?, page)
}

fn echo(port: u16) -> io::Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", port))?;
    println!("echo ready");
    let mut bytes = [0; 65_536];
    loop {
        let (count, from) = socket.recv_from(&mut bytes)?;
        socket.send_to(&bytes[..count], from)?;
    }
}
