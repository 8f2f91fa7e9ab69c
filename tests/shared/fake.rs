//! A server that answers what no real one at hand does.

use std::net::Ipv4Addr;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Takes commands on a loopback port, and answers what the test says, in the words of the protocol.
pub struct Fake {
    port: u16,
    accepting: JoinHandle<()>,
}

type Answer = fn(&[String]) -> String;

impl Fake {
    pub async fn start(answer: Answer) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(serve(client, answer));
            }
        });
        Self { port, accepting }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn serve(client: TcpStream, answer: Answer) {
    let mut client = BufReader::new(client);
    while let Some(command) = read(&mut client).await {
        if client.get_mut().write_all(answer(&command).as_bytes()).await.is_err() {
            return;
        }
    }
}

/// One command: an array of strings.
async fn read(client: &mut BufReader<TcpStream>) -> Option<Vec<String>> {
    let mut words = Vec::new();
    for _ in 0..number(client).await? {
        // The line break is not counted.
        let mut word = vec![0; number(client).await? + 2];
        client.read_exact(&mut word).await.ok()?;
        words.push(String::from_utf8_lossy(&word).trim_end().to_owned());
    }
    Some(words)
}

/// A line like `*3` or `$12`.
async fn number(client: &mut BufReader<TcpStream>) -> Option<usize> {
    let mut line = String::new();
    client.read_line(&mut line).await.ok()?;
    line.get(1..)?.trim_end().parse().ok()
}
