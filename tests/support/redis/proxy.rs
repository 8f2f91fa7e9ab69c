//! A network that fails, between a client and a server on one machine.

use std::future::pending;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, sink};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until};

use super::random_port;
use super::server::Server;

/// What the network does.
///
/// TCP never leaves something out and then goes on, so neither does the proxy: once anything was swallowed on a
/// connection, everything that follows in that direction is, until the connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is wrong.
    Pass,
    /// Each direction takes this long. It does not get narrower: what is sent together arrives together.
    Delay { requests: Duration, replies: Duration },
    /// Connections are accepted and stay open, whatever the server does, and nothing comes through.
    Blackhole,
    /// Requests reach the server, and nothing comes back.
    DropReplies,
    /// New connections are refused. Those that exist are as well as before.
    Refuse,
}

impl Fault {
    /// A round trip takes this long.
    pub fn round_trip(time: Duration) -> Self {
        Self::Delay { requests: time / 2, replies: time / 2 }
    }

    fn delay_of_requests(self) -> Option<Duration> {
        match self {
            Self::Delay { requests, .. } => Some(requests),
            Self::Pass | Self::DropReplies | Self::Refuse => Some(Duration::ZERO),
            Self::Blackhole => None,
        }
    }

    fn delay_of_replies(self) -> Option<Duration> {
        match self {
            Self::Delay { replies, .. } => Some(replies),
            Self::Pass | Self::Refuse => Some(Duration::ZERO),
            Self::Blackhole | Self::DropReplies => None,
        }
    }
}

/// What came to the proxy so far, whether it was passed on or not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    pub connections: u64,
    pub request_bytes: u64,
    pub reply_bytes: u64,
    /// Nothing that makes sense for a server with TLS.
    pub commands: u64,
}

/// A TCP proxy before a server. It has a port of its own, which it keeps while the server is killed and restarted.
///
/// It works on the runtime it was started on. A server that is not there shows as a connection that is closed at once;
/// only [`Fault::Refuse`] refuses.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    url: String,
    orders: mpsc::UnboundedSender<(Order, oneshot::Sender<()>)>,
    traffic: Arc<Mutex<Traffic>>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
enum Order {
    Be(Fault),
    Cut,
}

impl Proxy {
    pub async fn start(server: &Server) -> Self {
        let (listener, port) = loop {
            let port = random_port();
            if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
                break (listener, port);
            }
        };
        let (orders, ordered) = mpsc::unbounded_channel();
        let traffic = Arc::default();
        let accepting = tokio::spawn(accept(listener, port, server.port(), Arc::clone(&traffic), ordered));
        Self { port, url: server.url_at(port), orders, traffic, accepting }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The server's URL, by way of the proxy.
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// From now on, until the next call. What is under way arrives as it would have.
    pub async fn set(&self, fault: Fault) {
        self.order(Order::Be(fault)).await;
    }

    /// Closes all connections, on both sides. Clients may connect again.
    pub async fn cut(&self) {
        self.order(Order::Cut).await;
    }

    pub fn traffic(&self) -> Traffic {
        *self.traffic.lock().expect("nobody panics with the lock held")
    }

    async fn order(&self, order: Order) {
        let (done, obeyed) = oneshot::channel();
        self.orders.send((order, done)).expect("the proxy runs");
        obeyed.await.expect("the proxy runs");
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(
    listener: TcpListener,
    port: u16,
    server: u16,
    traffic: Arc<Mutex<Traffic>>,
    mut orders: mpsc::UnboundedReceiver<(Order, oneshot::Sender<()>)>,
) {
    let (fault, faults) = watch::channel(Fault::Pass);
    // Only without a listener does the system refuse.
    let mut listener = Some(listener);
    let mut connections = JoinSet::new();
    loop {
        let client = async {
            match &listener {
                Some(listener) => listener.accept().await.expect("a connection").0,
                None => pending().await,
            }
        };
        tokio::select! {
            // Orders first: a client that comes after an order is under it.
            biased;
            order = orders.recv() => {
                let Some((order, done)) = order else { return };
                match order {
                    Order::Cut => connections.shutdown().await,
                    Order::Be(Fault::Refuse) => {
                        listener = None;
                        // A process that is being started right now has a copy of it, for a moment longer.
                        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_ok() {
                            sleep(Duration::from_millis(1)).await;
                        }
                    }
                    Order::Be(_) if listener.is_none() => {
                        let again = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
                        listener = Some(again.expect("the port the proxy had"));
                    }
                    Order::Be(_) => {}
                }
                if let Order::Be(next) = order {
                    fault.send_replace(next);
                }
                let _ = done.send(());
            }
            client = client => {
                connections.spawn(carry(client, server, faults.clone(), Arc::clone(&traffic)));
            }
        }
    }
}

/// One connection, until a side closes it.
async fn carry(mut client: TcpStream, server: u16, faults: watch::Receiver<Fault>, traffic: Arc<Mutex<Traffic>>) {
    let fault = || *faults.borrow();
    let count =
        |counted: &dyn Fn(&mut Traffic)| counted(&mut traffic.lock().expect("nobody panics with the lock held"));
    count(&|traffic| traffic.connections += 1);

    let mut commands = Commands::default();
    let count_requests = |bytes: &[u8]| {
        let begun = commands.begun_in(bytes);
        count(&|traffic| {
            traffic.request_bytes += bytes.len() as u64;
            traffic.commands += begun;
        });
    };
    let count_replies = |bytes: &[u8]| count(&|traffic| traffic.reply_bytes += bytes.len() as u64);

    let (from_client, to_client) = client.split();
    if fault() == Fault::Blackhole {
        // The server never hears of it.
        relay(from_client, sink(), || None, count_requests).await;
        return;
    }
    let Ok(mut server) = TcpStream::connect((Ipv4Addr::LOCALHOST, server)).await else { return };
    let (from_server, to_server) = server.split();
    let requests = relay(from_client, to_server, || fault().delay_of_requests(), count_requests);
    let replies = async {
        if relay(from_server, to_client, || fault().delay_of_replies(), count_replies).await == Relayed::NotAll {
            // Nor does the client hear that the server is gone.
            pending::<()>().await;
        }
    };
    tokio::select! {
        _ = requests => {}
        () = replies => {}
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Relayed {
    All,
    NotAll,
}

/// Takes everything from one side to the other, until the first one ends: what then is still under way arrives. `delay`
/// says how long what has just come takes, `None` that it is lost.
async fn relay(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    delay: impl Fn() -> Option<Duration>,
    mut count: impl FnMut(&[u8]),
) -> Relayed {
    let (underway, mut arriving) = mpsc::unbounded_channel();
    let read = async move {
        let mut relayed = Relayed::All;
        let mut buffer = vec![0; 64 << 10];
        while let Ok(length @ 1..) = from.read(&mut buffer).await {
            let bytes = &buffer[..length];
            count(bytes);
            match delay() {
                Some(delay) if relayed == Relayed::All => {
                    // Nobody takes it when the other side is gone: that is for the other side's own relay to tell.
                    let _ = underway.send((Instant::now() + delay, bytes.to_vec()));
                }
                _ => relayed = Relayed::NotAll,
            }
        }
        relayed
    };
    let write = async move {
        while let Some((due, bytes)) = arriving.recv().await {
            // A timer is good to a millisecond, so none is set where there is no delay.
            if due > Instant::now() {
                sleep_until(due).await;
            }
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    tokio::join!(read, write).0
}

/// Counts commands in what a client sends: each is an array (`*2`), a line, of strings (`$4`), a line and the bytes.
#[derive(Debug, Default)]
struct Commands {
    line: Vec<u8>,
    /// How much of a string, and the end of its line, is still to come.
    string: usize,
}

impl Commands {
    /// How many begin in what comes next.
    fn begun_in(&mut self, bytes: &[u8]) -> u64 {
        let mut begun = 0;
        for &byte in bytes {
            if self.string > 0 {
                self.string -= 1;
            } else if byte != b'\n' {
                self.line.push(byte);
            } else {
                let line = String::from_utf8_lossy(&self.line);
                begun += u64::from(line.starts_with('*'));
                let length = line.strip_prefix('$').and_then(|length| length.trim_end().parse::<usize>().ok());
                self.string = length.map_or(0, |length| length + "\r\n".len());
                self.line.clear();
            }
        }
        begun
    }
}
