//! What can go wrong with the store, without a type of the client crate.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::fmt::Write as _;

use redis::{ErrorKind, RedisError, ServerErrorKind};

/// What is said of an error, at most.
const LONGEST: usize = 256;

/// The store did not do what it was asked to; the gate of this process decided instead.
///
/// Never says more than 256 printable characters, and no password.
///
/// ```
/// use tower_host_gate::shared::{BackendError, BackendErrorKind};
///
/// /// Somebody has to do something, or it stays like this.
/// fn is_misconfigured(error: &BackendError) -> bool {
///     matches!(error.kind(), BackendErrorKind::OutOfMemory | BackendErrorKind::Unsupported | BackendErrorKind::Reply)
/// }
/// ```
#[derive(Clone, Debug)]
pub struct BackendError {
    kind: BackendErrorKind,
    text: Cow<'static, str>,
}

/// What kind of failure a [`BackendError`] is.
///
/// ```
/// use tower_host_gate::shared::BackendErrorKind;
///
/// assert_eq!(BackendErrorKind::OutOfMemory.to_string(), "out-of-memory");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendErrorKind {
    /// The store is known to be out of reach, and was not asked.
    Down,
    /// No answer within the [timeout](crate::Redis::timeout). The store may have done what it was asked to.
    Timeout,
    /// No connection, or it broke.
    Unreachable,
    /// The server is still reading its data from disk.
    Loading,
    /// The server is a replica: there was a failover, or the address is wrong.
    ReadOnly,
    /// The server has lost its master, a sentinel knows of none, or the cluster does not serve this host.
    MasterDown,
    /// The server has used up its `maxmemory`, and may not evict.
    OutOfMemory,
    /// The server is too old, is none, or is one of a cluster that was opened as if it were alone.
    Unsupported,
    /// A permit was given back after it had ended: the request took longer than the [lease](crate::Redis::lease_ttl),
    /// and was not counted to its end.
    LeaseExpired,
    /// The server refused: a wrong password, a right that is missing, a key that somebody else has written.
    Reply,
}

impl BackendErrorKind {
    /// The kind in kebab-case.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::Timeout => "timeout",
            Self::Unreachable => "unreachable",
            Self::Loading => "loading",
            Self::ReadOnly => "read-only",
            Self::MasterDown => "master-down",
            Self::OutOfMemory => "out-of-memory",
            Self::Unsupported => "unsupported",
            Self::LeaseExpired => "lease-expired",
            Self::Reply => "reply",
        }
    }
}

impl fmt::Display for BackendErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl BackendError {
    /// An error of our own making.
    pub(crate) fn new(kind: BackendErrorKind, text: &'static str) -> Self {
        Self { kind, text: Cow::Borrowed(text) }
    }

    /// The kind, to branch on.
    pub fn kind(&self) -> BackendErrorKind {
        self.kind
    }

    /// About the connection rather than about the call.
    pub(crate) fn is_outage(&self) -> bool {
        use BackendErrorKind::{Down, Loading, MasterDown, ReadOnly, Timeout, Unreachable};
        matches!(self.kind, Down | Loading | MasterDown | ReadOnly | Timeout | Unreachable)
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.text)
    }
}

impl Error for BackendError {}

impl From<RedisError> for BackendError {
    fn from(error: RedisError) -> Self {
        let text = match (error.code(), error.detail()) {
            (Some(code), Some(detail)) => format!("{code} {detail}"),
            _ => error.to_string(),
        };
        Self { kind: kind_of(&error, &text), text: Cow::Owned(printable(&text)) }
    }
}

fn kind_of(error: &RedisError, text: &str) -> BackendErrorKind {
    match error.kind() {
        ErrorKind::Io if error.is_timeout() => BackendErrorKind::Timeout,
        // What cannot be read is not Redis, or no longer in step.
        ErrorKind::Io
        | ErrorKind::Parse
        | ErrorKind::Client
        | ErrorKind::InvalidClientConfig
        | ErrorKind::ClusterConnectionNotFound => BackendErrorKind::Unreachable,
        ErrorKind::RESP3NotSupported => BackendErrorKind::Unsupported,
        ErrorKind::MasterNameNotFoundBySentinel => BackendErrorKind::MasterDown,
        ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask) => BackendErrorKind::Unsupported,
        _ => kind_of_reply(text),
    }
}

/// The code is the first word of an error reply. Redis 6.2 answers `ERR` when a command in a script fails, and has the
/// command's own reply, with a dash before its code, somewhere in the text.
fn kind_of_reply(text: &str) -> BackendErrorKind {
    let by_code = text.split_ascii_whitespace().find_map(|word| {
        Some(match word.strip_prefix('-').unwrap_or(word) {
            "LOADING" => BackendErrorKind::Loading,
            "READONLY" => BackendErrorKind::ReadOnly,
            "MASTERDOWN" | "CLUSTERDOWN" => BackendErrorKind::MasterDown,
            "OOM" => BackendErrorKind::OutOfMemory,
            _ => return None,
        })
    });
    by_code.unwrap_or_else(|| {
        let text = text.to_ascii_lowercase();
        let unsupported = [
            "unknown command",
            "unknown redis command",
            "not allowed from script",
            "write commands not allowed after non deterministic commands",
        ];
        if unsupported.iter().any(|part| text.contains(part)) {
            BackendErrorKind::Unsupported
        } else {
            BackendErrorKind::Reply
        }
    })
}

/// The text as it may be shown to anybody: on one line, not too long, and without what should not be in it.
fn printable(text: &str) -> String {
    // A server that does not know a command repeats its arguments: those of `HELLO` are user and password.
    let text = text.split("with args beginning with").next().unwrap_or_default();
    let mut shown = String::new();
    for (nth, part) in text.split("://").enumerate() {
        // What follows `://` up to an `@` is a user and a password.
        let end = part.find(char::is_whitespace).unwrap_or(part.len());
        let secret = if nth == 0 { 0 } else { part[..end].rfind('@').map_or(0, |at| at + 1) };
        let scheme = if nth == 0 { "" } else { "://" };
        let _ = write!(shown, "{scheme}{}", &part[secret..]);
    }
    let shown = shown.trim_end_matches([' ', ',']);

    let mut bounded = String::with_capacity(shown.len());
    let mut left = LONGEST;
    for character in shown.chars() {
        let escaped: String =
            if character.is_control() { character.escape_default().collect() } else { character.into() };
        let length = escaped.chars().count();
        if length > left {
            break;
        }
        left -= length;
        bounded.push_str(&escaped);
    }
    bounded
}

/// What was given to open a [`Redis`](crate::Redis) is not an address. The error does not repeat it.
///
/// ```
/// use tower_host_gate::Redis;
///
/// let error = Redis::open("http://user:secret@10.0.0.5/").unwrap_err();
/// assert!(error.to_string().contains("redis://"), "it says what is possible");
/// assert!(!error.to_string().contains("secret"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidRedis {
    problem: Cow<'static, str>,
}

impl InvalidRedis {
    pub(crate) fn new(problem: &'static str) -> Self {
        Self { problem: Cow::Borrowed(problem) }
    }

    /// What the client crate dislikes: a fixed text, and perhaps a detail, which may be part of the address.
    pub(crate) fn because(error: &RedisError) -> Self {
        let text = error.to_string();
        let fixed = text.split(" - ").next().unwrap_or_default();
        Self { problem: Cow::Owned(printable(fixed)) }
    }
}

impl fmt::Display for InvalidRedis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not an address of Redis: {}", self.problem)
    }
}

impl Error for InvalidRedis {}

#[cfg(test)]
mod tests;
