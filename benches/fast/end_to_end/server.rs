//! The server at the other end, in a process of its own.

use std::convert::Infallible;
use std::io::{BufRead, BufReader};

use bytes::Bytes;
use http::{Request, Response, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use tokio::net::TcpListener;

use crate::child::{self, Running};
use crate::contention::crowd::runtime;

pub(crate) struct Server {
    pub(crate) port: u16,
    _running: Running,
}

impl Server {
    pub(crate) fn start() -> Self {
        let mut running = child::start("server");
        let mut line = String::new();
        let printed = running.0.stdout.take().expect("it is piped");
        BufReader::new(printed).read_line(&mut line).expect("the server prints its port");
        Self { port: line.trim().parse().expect("a port"), _running: running }
    }
}

/// Says its port, and answers until it is killed.
pub(crate) fn serve() {
    runtime(1).block_on(async {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        println!("{}", listener.local_addr().expect("it is bound").port());
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            stream.set_nodelay(true).expect("it is connected");
            let connection = async {
                let server = Builder::new(TokioExecutor::new());
                // A client that goes away is none of the server's business.
                let _ = server.serve_connection(TokioIo::new(stream), service_fn(answer)).await;
            };
            tokio::spawn(connection);
        }
    });
}

async fn answer(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let response = Response::builder()
        .header(header::SERVER, "hyper")
        .header(header::CONTENT_TYPE, "application/rss+xml; charset=utf-8")
        .header(header::ETAG, "\"5f3a-1c2d\"")
        .header(header::CACHE_CONTROL, "max-age=300, public")
        .body(Full::from(Bytes::from_static(&[b'x'; 1024])));
    Ok(response.expect("the headers are well formed"))
}
