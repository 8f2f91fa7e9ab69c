//! Where the store is.

use std::fmt;
use std::time::Duration;

use futures_util::future::select_ok;
use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClientBuilder;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, ProtocolVersion,
    RedisConnectionInfo, RedisError, RedisResult, TlsCertificates, cmd,
};
use rustls::crypto::CryptoProvider;

use super::connection::Wire;
use crate::shared::error::InvalidRedis;

const SENTINEL_PORT: u16 = 26379;
/// How long a cluster may take for one attempt of one call. Each call has a limit of its own, far shorter; when an
/// attempt ends before that, the client sends the call again, to a server that is slow already.
const ATTEMPT: Duration = Duration::from_secs(5);

/// One server, the master that sentinels know, or a cluster.
#[derive(Clone)]
pub(crate) struct Target {
    place: Place,
    /// The certificates of the authorities that are trusted, in PEM, instead of the usual ones.
    root: Option<Vec<u8>>,
}

#[derive(Clone)]
enum Place {
    Server(ConnectionInfo),
    /// The nodes are those of the sentinels; user, password, database and TLS are the master's too.
    Sentinel {
        nodes: Vec<ConnectionInfo>,
        service: String,
    },
    Cluster(Vec<ConnectionInfo>),
}

impl Target {
    /// One server's URL, or `redis+sentinel://[user:password@]h1,h2/service[/db]`, or
    /// `redis+cluster://[user:password@]h1,h2`, both with `rediss` too.
    pub(crate) fn parse(url: &str) -> Result<Self, InvalidRedis> {
        let (scheme, rest) = url.split_once("://").ok_or(InvalidRedis::new(SCHEMES))?;
        let Some((scheme, kind @ ("sentinel" | "cluster"))) = scheme.split_once('+') else {
            return Ok(Self::at(Place::Server(node(url)?)));
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, hosts) = match authority.rsplit_once('@') {
            Some((user, hosts)) => (format!("{user}@"), hosts),
            None => (String::new(), authority),
        };
        let nodes = |path: &str| hosts.split(',').map(|host| format!("{scheme}://{user}{host}/{path}")).collect();
        if kind == "cluster" {
            return Self::cluster(nodes(path));
        }
        let (service, database) = path.split_once('/').unwrap_or((path, ""));
        Self::sentinel(nodes(database), service.to_owned())
    }

    pub(crate) fn sentinel(nodes: Vec<String>, service: String) -> Result<Self, InvalidRedis> {
        if service.is_empty() || service.contains(['/', '?', '#']) {
            return Err(InvalidRedis::new(
                "the sentinels have to be asked for a service, as in redis+sentinel://host/service",
            ));
        }
        let nodes = nodes.iter().map(|url| node(&with_port(url, SENTINEL_PORT)));
        let nodes = several(nodes.collect::<Result<_, _>>()?)?;
        Ok(Self::at(Place::Sentinel { nodes, service }))
    }

    pub(crate) fn cluster(nodes: Vec<String>) -> Result<Self, InvalidRedis> {
        let nodes = several(nodes.iter().map(|url| node(url)).collect::<Result<_, _>>()?)?;
        if nodes.iter().any(|node| node.redis_settings().db() != 0) {
            return Err(InvalidRedis::new("a cluster has no other database than 0"));
        }
        ClusterClientBuilder::new(nodes.clone()).build().map_err(|error| InvalidRedis::because(&error))?;
        Ok(Self::at(Place::Cluster(nodes)))
    }

    /// Whether the certificates can be read shows when they are needed.
    pub(crate) fn with_root_certificate(mut self, pem: Vec<u8>) -> Self {
        self.root = Some(pem);
        self
    }

    fn at(place: Place) -> Self {
        Self { place, root: None }
    }

    // --- connecting -----------------------------------------------------------------------------------------------

    /// Connects, to whichever server is the master now. `config` is for the connection on which messages come.
    pub(super) async fn connect(&self, config: &AsyncConnectionConfig, limit: Duration) -> RedisResult<Wire> {
        match &self.place {
            Place::Server(server) => Ok(Wire::Server(self.connect_to(server.clone(), config).await?)),
            Place::Sentinel { nodes, service } => {
                // Whoever answers first: none that hangs is in the way.
                let asked = nodes.iter().map(|node| Box::pin(self.ask_sentinel(node, service, limit)));
                let (master, _) = select_ok(asked).await?;
                Ok(Wire::Server(self.connect_to(master, config).await?))
            }
            Place::Cluster(nodes) => {
                let mut cluster = ClusterClientBuilder::new(nodes.clone())
                    .tcp_settings(tcp())
                    .connection_timeout(limit)
                    .response_timeout(ATTEMPT)
                    .overall_response_timeout(None)
                    // In milliseconds; all of them are within the limit of the call.
                    .min_retry_wait(10)
                    .max_retry_wait(100);
                if let Some(certificates) = self.certificates_for(&nodes[0]) {
                    cluster = cluster.certs(certificates);
                }
                let calls = cluster.build()?.get_async_connection().await?;
                let any = nodes.iter().map(|node| Box::pin(self.connect_to(node.clone(), config)));
                let (messages, _) = select_ok(any).await?;
                Ok(Wire::Cluster { calls, messages })
            }
        }
    }

    async fn connect_to(
        &self,
        server: ConnectionInfo,
        config: &AsyncConnectionConfig,
    ) -> RedisResult<MultiplexedConnection> {
        let client = match self.certificates_for(&server) {
            Some(certificates) => Client::build_with_tls(server, certificates)?,
            None => Client::open(server)?,
        };
        client.get_multiplexed_async_connection_with_config(config).await
    }

    /// Where the master is, as a sentinel says. redis-rs can ask too, but then asks the master for its role, for which
    /// it needs a right that our calls do not.
    async fn ask_sentinel(&self, node: &ConnectionInfo, service: &str, limit: Duration) -> RedisResult<ConnectionInfo> {
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(limit)).set_response_timeout(Some(limit));
        let settings = node.redis_settings().clone().set_db(0);
        let mut sentinel = match self.connect_to(node.clone().set_redis_settings(settings), &config).await {
            // The master's user need not be the sentinel's.
            Err(error) if error.code() == Some("WRONGPASS") => {
                let nobody = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3);
                self.connect_to(node.clone().set_redis_settings(nobody), &config).await?
            }
            connected => connected?,
        };
        let mut question = cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
        let Some((host, port)) = question.query_async(&mut sentinel).await? else {
            return Err((ErrorKind::MasterNameNotFoundBySentinel, "no sentinel knows a master of this name").into());
        };
        let address = match node.addr().clone() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure, tls_params }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        Ok(node.clone().set_addr(address))
    }

    /// What a TLS connection needs.
    fn certificates_for(&self, node: &ConnectionInfo) -> Option<TlsCertificates> {
        if !is_tls(node) {
            return None;
        }
        // rustls does the same, but panics when a program brings several providers, or none.
        if CryptoProvider::get_default().is_none() {
            // An error says that somebody else was faster.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        self.root.clone().map(|root| TlsCertificates { client_tls: None, root_cert: Some(root) })
    }
}

/// The addresses, without user and password.
impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, nodes, service) = match &self.place {
            Place::Server(server) => ("server", std::slice::from_ref(server), None),
            Place::Sentinel { nodes, service } => ("sentinel", nodes.as_slice(), Some(service)),
            Place::Cluster(nodes) => ("cluster", nodes.as_slice(), None),
        };
        write!(f, "{kind}")?;
        for node in nodes {
            write!(f, " {}", node.addr())?;
        }
        service.map_or(Ok(()), |service| write!(f, " {service:?}"))
    }
}

const SCHEMES: &str = "it begins with none of redis://, rediss://, redis+unix://, redis+sentinel://, \
                       rediss+sentinel://, redis+cluster://, rediss+cluster://";

/// One server's URL.
fn node(url: &str) -> Result<ConnectionInfo, InvalidRedis> {
    if url.split_once("://").is_none_or(|(scheme, _)| !is_scheme(scheme)) {
        return Err(InvalidRedis::new(SCHEMES));
    }
    let Some(parsed) = redis::parse_redis_url(url) else {
        return Err(InvalidRedis::new("the URL cannot be read; in a password, / ? # @ : and % have to be %-encoded"));
    };
    let node = parsed.into_connection_info().map_err(|error: RedisError| InvalidRedis::because(&error))?;
    match node.addr() {
        ConnectionAddr::TcpTls { insecure: true, .. } => {
            return Err(InvalidRedis::new(
                "TLS without checking the certificate is not supported; see root_certificate",
            ));
        }
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } if host.contains(',') => {
            return Err(InvalidRedis::new("several hosts are those of redis+sentinel:// or redis+cluster://"));
        }
        _ => {}
    }
    let settings = node.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    Ok(node.set_redis_settings(settings).set_tcp_settings(tcp()))
}

fn is_scheme(scheme: &str) -> bool {
    matches!(scheme, "redis" | "rediss" | "valkey" | "valkeys" | "redis+unix" | "valkey+unix" | "unix")
}

fn several(nodes: Vec<ConnectionInfo>) -> Result<Vec<ConnectionInfo>, InvalidRedis> {
    let Some(first) = nodes.first() else {
        return Err(InvalidRedis::new("there is no node"));
    };
    if nodes.iter().any(|node| matches!(node.addr(), ConnectionAddr::Unix(_))) {
        return Err(InvalidRedis::new("a cluster and sentinels are not reached by a socket in the file system"));
    }
    if nodes.iter().any(|node| is_tls(node) != is_tls(first)) {
        return Err(InvalidRedis::new("either all nodes speak TLS or none does"));
    }
    Ok(nodes)
}

fn is_tls(node: &ConnectionInfo) -> bool {
    matches!(node.addr(), ConnectionAddr::TcpTls { .. })
}

/// Calls are small, and wait for their answers: they must not wait to be sent.
fn tcp() -> TcpSettings {
    TcpSettings::default().set_nodelay(true)
}

/// The URL with this port, if it has none.
fn with_port(url: &str, port: u16) -> String {
    let start = url.find("://").map_or(0, |scheme| scheme + "://".len());
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |length| start + length);
    let (authority, rest) = url.split_at(end);
    let host = authority[start..].rsplit('@').next().unwrap_or_default();
    // An IPv6 address in brackets has colons of its own.
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    if has_port { url.to_owned() } else { format!("{authority}:{port}{rest}") }
}
