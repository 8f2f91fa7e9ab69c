//! Which host a request belongs to: the key under which requests share a gate.
//!
//! Pure text work; nothing here knows of tower, tokio or a lock.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::Ipv6Addr;
use std::str::FromStr;
use std::sync::Arc;

use http::header::HOST;
use http::{Extensions, HeaderMap, Uri};

/// The name under which requests share one gate, `host:port` as a rule.
///
/// Always printable and at most 256 bytes long, whatever it was made from: characters that do not print are escaped, and
/// of a longer text the beginning and a hash remain. User info is never part of it.
///
/// ```
/// use tower_host_gate::HostKey;
///
/// let key: HostKey = "HTTPS://User:secret@Example.COM./feed".parse()?;
/// assert_eq!(key.as_str(), "example.com:443");
/// assert_eq!(key.name(), "example.com");
/// # Ok::<(), tower_host_gate::InvalidHost>(())
/// ```
///
/// Keys of up to 62 bytes, port included, are kept inline, so making one of an ordinary authority allocates nothing.
#[derive(Clone)]
pub struct HostKey(Text);

#[derive(Clone)]
enum Text {
    Short { len: u8, bytes: [u8; SHORT] },
    Long(Arc<str>),
}

/// Keeps a `HostKey` at 64 bytes.
const SHORT: usize = 62;
/// A domain name has at most 253 characters; what is longer came from somebody who wants to fill our memory.
const LONGEST: usize = 256;

impl HostKey {
    /// A key of the caller's own making, for a [`Keying`] function: taken as it stands, but for the bounds named above.
    ///
    /// ```
    /// use tower_host_gate::HostKey;
    ///
    /// assert_eq!(HostKey::new("api.example/v2").as_str(), "api.example/v2");
    /// assert_eq!(HostKey::new("two\nlines").as_str(), "two\\nlines");
    /// ```
    pub fn new(text: impl AsRef<str>) -> Self {
        let text = text.as_ref();
        let mut buffer = Buffer::default();
        if text.bytes().all(|b| b.is_ascii_graphic() && b != b'\\') {
            buffer.push(text);
        } else {
            // Escaping the backslash too keeps two different texts two different keys.
            let mut utf8 = [0; 4];
            for c in text.escape_debug() {
                buffer.push(c.encode_utf8(&mut utf8));
            }
        }
        buffer.finish()
    }

    /// The key that consists of these parts of a key's text.
    pub(crate) fn of_parts(text: &str, rest: &str) -> Self {
        let mut buffer = Buffer::default();
        buffer.push(text);
        buffer.push(rest);
        buffer.finish()
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        match &self.0 {
            Text::Short { len, bytes } => {
                // Invariant: `Buffer` copies whole `str`s only.
                std::str::from_utf8(&bytes[..usize::from(*len)]).unwrap_or_default()
            }
            Text::Long(text) => text,
        }
    }

    /// The key without its port: what a limit given "by name" is matched against.
    pub fn name(&self) -> &str {
        let text = self.as_str();
        match text.rsplit_once(':') {
            // A bracket behind the last colon means that the colon is inside an IPv6 address.
            Some((name, port)) if !name.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => text,
        }
    }

    #[inline]
    fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Text::Short { len, bytes } => &bytes[..usize::from(*len)],
            Text::Long(text) => text.as_bytes(),
        }
    }
}

/// Reads `host`, `host:port`, a bare IP address or a URL. Without a port and without a scheme the key is the bare name, which the functions
/// that take a host by name understand as "all its ports". Unicode names become their A-label (feature `idna`).
impl FromStr for HostKey {
    type Err = InvalidHost;

    fn from_str(text: &str) -> Result<Self, InvalidHost> {
        let text = text.trim();
        if let Ok(address) = text.parse::<Ipv6Addr>() {
            return Ok(Self::new(format!("[{address}]")));
        }
        let (scheme, authority) = match text.split_once("://") {
            Some((scheme, rest)) => (Some(scheme.to_ascii_lowercase()), rest.split(['/', '?', '#']).next()),
            None => (None, Some(text)),
        };
        let ascii = to_ascii(authority.unwrap_or_default()).ok_or(InvalidHost(()))?;
        let (host, port) = split(&ascii).ok_or(InvalidHost(()))?;
        if !host.bytes().all(is_authority) || !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(InvalidHost(()));
        }
        let default = scheme.and_then(|scheme| default_port(&scheme));
        normal(&ascii, Port::Or(default)).ok_or(InvalidHost(()))
    }
}

/// A text that names no host.
///
/// ```
/// use tower_host_gate::{HostKey, InvalidHost};
///
/// let error: InvalidHost = "two words".parse::<HostKey>().unwrap_err();
/// assert!(error.to_string().starts_with("not a host name"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidHost(());

impl fmt::Display for InvalidHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a host name: expected `host`, `host:port` or a URL")
    }
}

impl std::error::Error for InvalidHost {}

/// Decides which requests share a gate.
///
/// Implemented by [`By`] and by every `Fn(&Uri, &HeaderMap, &Extensions) -> Option<HostKey>`, so that a token, a proxy or
/// a path prefix can be part of the key. `None` sends the request on without a gate.
///
/// ```
/// use tower_host_gate::{By, HostGateLayer, HostKey, Keying};
///
/// // One gate for every subdomain of a provider, the usual key for everybody else.
/// let layer = HostGateLayer::new().keying(|uri: &http::Uri, headers: &http::HeaderMap, ext: &http::Extensions| {
///     match uri.host() {
///         Some(host) if host.ends_with(".feeds.example") => Some(HostKey::new("feeds.example")),
///         _ => By::Authority.key(uri, headers, ext),
///     }
/// });
/// ```
pub trait Keying: Send + Sync + 'static {
    /// The key of the request, `None` to let it pass ungated.
    fn key(&self, uri: &Uri, headers: &HeaderMap, extensions: &Extensions) -> Option<HostKey>;

    /// Which of the ready-made ways this is, if it is one: then a text that names a host (in
    /// [`per_host`](crate::HostGateLayer::per_host), for one) can be told from a mistake. Default none.
    fn by(&self) -> Option<By> {
        None
    }
}

impl<F> Keying for F
where
    F: Fn(&Uri, &HeaderMap, &Extensions) -> Option<HostKey> + Send + Sync + 'static,
{
    fn key(&self, uri: &Uri, headers: &HeaderMap, extensions: &Extensions) -> Option<HostKey> {
        self(uri, headers, extensions)
    }
}

/// The ready-made ways of keying.
///
/// The host is lower-cased, one trailing dot is dropped, IPv6 addresses are written in their canonical form. IPv4
/// addresses in odd forms (`127.1`, `0x7f.0.0.1`) keep their text: `http::Uri` does not interpret them either. A request
/// in origin form (`GET /path`) is keyed on its `Host` header; without a host, or with a header that cannot be one, it
/// passes ungated.
///
/// ```
/// use http::{Extensions, HeaderMap, Uri};
/// use tower_host_gate::{By, HostGateLayer, Keying};
///
/// let uri = Uri::from_static("https://Example.com/feed");
/// let key = |by: By| by.key(&uri, &HeaderMap::new(), &Extensions::new()).unwrap();
/// assert_eq!(key(By::Authority), "example.com:443");
/// assert_eq!(key(By::Host), "example.com");
///
/// let layer = HostGateLayer::new().keying(By::Host);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum By {
    /// `host:port`, the scheme's default port filled in (`http`/`ws` 80, `https`/`wss` 443); so `http` and `https` on
    /// one host are two gates. A request without scheme and port (origin form) has the bare host as its key. A port that
    /// is no 16-bit number is a key of its own.
    #[default]
    Authority,
    /// The host alone: all ports and schemes of it share one gate.
    Host,
}

impl Keying for By {
    #[inline]
    fn key(&self, uri: &Uri, headers: &HeaderMap, _: &Extensions) -> Option<HostKey> {
        let authority = match uri.authority() {
            Some(authority) => authority.as_str(),
            None => headers.get(HOST)?.to_str().ok().filter(|host| host.bytes().all(is_authority))?,
        };
        let port = match self {
            Self::Authority => Port::Or(uri.scheme_str().and_then(default_port)),
            Self::Host => Port::Never,
        };
        normal(authority, port)
    }

    fn by(&self) -> Option<By> {
        Some(*self)
    }
}

/// Whether the port belongs to the key, and which one does where the text has none.
#[derive(Clone, Copy)]
enum Port {
    Or(Option<u16>),
    Never,
}

/// What may stand in an authority, roughly: no white space, no control character, nothing that ends it.
fn is_authority(b: u8) -> bool {
    b.is_ascii_graphic() && !b"/?#\\".contains(&b)
}

fn default_port(scheme: &str) -> Option<u16> {
    match scheme {
        "http" | "ws" => Some(80),
        "https" | "wss" => Some(443),
        _ => None,
    }
}

/// `[userinfo@]host[:port]` in its normal form; `None` where there is no host in it.
#[inline]
fn normal(authority: &str, port: Port) -> Option<HostKey> {
    if let Some(key) = plain(authority, port) {
        return Some(key);
    }
    odd(authority, port)
}

/// What takes more than copying.
#[cold]
fn odd(authority: &str, port: Port) -> Option<HostKey> {
    let (host, port_text) = split(authority)?;
    let mut buffer = Buffer::default();
    match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).map(str::parse::<Ipv6Addr>) {
        Some(Ok(address)) => write!(buffer, "[{address}]").ok()?,
        _ => buffer.push(host.strip_suffix('.').unwrap_or(host)),
    }
    if buffer.is_empty() {
        return None;
    }
    buffer.make_ascii_lowercase();
    if let Port::Or(default) = port {
        buffer.push_port(port_text, default);
    }
    Some(buffer.finish())
}

/// The common case, a host name and perhaps a port that are normal as they stand, is only copied.
#[inline]
fn plain(authority: &str, port: Port) -> Option<HostKey> {
    // The whole buffer is looked at, sixteen bytes at a time, because that takes no loop.
    let mut bytes = [0; 64];
    bytes.get_mut(..authority.len())?.copy_from_slice(authority.as_bytes());
    // From `:` to `[` lie all that make an authority odd: a port, capitals, the `@` of user info, an IPv6 address.
    let odd = |b: u8| b.wrapping_sub(b':') <= b'[' - b':';
    let (host, port) = if bytes.iter().fold(0, |any, b| any | u8::from(odd(*b))) == 0 {
        match port {
            Port::Or(Some(443)) => (authority.len(), ":443"),
            Port::Or(Some(80)) => (authority.len(), ":80"),
            Port::Or(Some(_)) => return None,
            Port::Or(None) | Port::Never => (authority.len(), ""),
        }
    } else {
        let host = authority.bytes().position(odd)?;
        match port {
            Port::Or(_) if is_normal_port(&authority.as_bytes()[host..]) => (host, ""),
            _ => return None,
        }
    };
    if host == 0 || bytes[host - 1] == b'.' {
        return None;
    }
    let len = authority.len() + port.len();
    bytes.get_mut(authority.len()..len)?.copy_from_slice(port.as_bytes());
    if len > SHORT {
        return None;
    }
    let [bytes @ .., _, _] = bytes;
    Some(HostKey(Text::Short { len: len as u8, bytes }))
}

/// A colon and a port that has no needless zeros and, with four digits at most, needs no look at its size.
fn is_normal_port(text: &[u8]) -> bool {
    matches!(text, [b':', b'1'..=b'9', rest @ ..] if rest.len() < 4 && rest.iter().all(u8::is_ascii_digit))
}

/// Host (an IPv6 address with its brackets) and port text, without the user info.
fn split(authority: &str) -> Option<(&str, &str)> {
    let authority = authority.rsplit_once('@').map_or(authority, |(_, rest)| rest);
    let end = match authority.starts_with('[') {
        true => authority.find(']')? + 1,
        false => authority.find(':').unwrap_or(authority.len()),
    };
    let (host, rest) = authority.split_at(end);
    Some((host, rest.strip_prefix(':').unwrap_or(rest)))
}

/// The A-label form of a Unicode name.
fn to_ascii(authority: &str) -> Option<Cow<'_, str>> {
    if authority.is_ascii() {
        return Some(Cow::Borrowed(authority));
    }
    let (host, port) = split(authority)?;
    let host = a_label(host)?;
    Some(if port.is_empty() { host.into() } else { format!("{host}:{port}").into() })
}

#[cfg(feature = "idna")]
fn a_label(host: &str) -> Option<String> {
    idna::domain_to_ascii(host).ok()
}

#[cfg(not(feature = "idna"))]
fn a_label(_: &str) -> Option<String> {
    None
}

/// Text under construction, on the stack as long as it is short.
struct Buffer {
    len: usize,
    short: [u8; SHORT],
    long: String,
}

impl Default for Buffer {
    fn default() -> Self {
        Self { len: 0, short: [0; SHORT], long: String::new() }
    }
}

impl Buffer {
    fn push(&mut self, text: &str) {
        let end = self.len + text.len();
        if self.long.is_empty() && end <= SHORT {
            self.short[self.len..end].copy_from_slice(text.as_bytes());
            self.len = end;
            return;
        }
        if self.long.is_empty() {
            // Invariant: only whole `str`s were copied in.
            self.long.push_str(std::str::from_utf8(&self.short[..self.len]).unwrap_or_default());
        }
        self.long.push_str(text);
    }

    fn is_empty(&self) -> bool {
        self.len == 0 && self.long.is_empty()
    }

    fn push_port(&mut self, text: &str, default: Option<u16>) {
        let number = if text.is_empty() { default } else { text.parse::<u16>().ok() };
        match number {
            Some(80) => self.push(":80"),
            Some(443) => self.push(":443"),
            Some(number) => {
                // Writing into this buffer cannot fail.
                let _ = write!(self, ":{number}");
            }
            None if text.is_empty() => {}
            None => {
                self.push(":");
                self.push(text);
            }
        }
    }

    fn make_ascii_lowercase(&mut self) {
        self.short[..self.len].make_ascii_lowercase();
        self.long.make_ascii_lowercase();
    }

    fn finish(self) -> HostKey {
        if self.long.is_empty() {
            // Invariant: `len <= SHORT`, which fits a `u8`.
            return HostKey(Text::Short { len: self.len as u8, bytes: self.short });
        }
        if self.long.len() <= LONGEST {
            return HostKey(Text::Long(self.long.into()));
        }
        let mut hasher = DefaultHasher::new();
        self.long.hash(&mut hasher);
        let mut bounded = self.long;
        while bounded.len() > LONGEST - 17 {
            bounded.pop();
        }
        // Writing to a string cannot fail.
        let _ = write!(bounded, "~{:016x}", hasher.finish());
        HostKey(Text::Long(bounded.into()))
    }
}

impl fmt::Write for Buffer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text);
        Ok(())
    }
}

impl PartialEq for HostKey {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            // What is behind `len` is zero, so all of it may be compared, which takes no loop.
            (Text::Short { len: a, bytes: x }, Text::Short { len: b, bytes: y }) => a == b && x == y,
            (Text::Long(a), Text::Long(b)) => a == b,
            // A text has one form: short if it fits.
            _ => false,
        }
    }
}

impl Eq for HostKey {}

impl Hash for HostKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Without the length that a slice's own `Hash` adds: nothing is hashed beside it.
        state.write(self.as_bytes());
    }
}

impl PartialOrd for HostKey {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for HostKey {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl AsRef<str> for HostKey {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl PartialEq<str> for HostKey {
    fn eq(&self, other: &str) -> bool {
        self.as_str() == other
    }
}

impl PartialEq<&str> for HostKey {
    fn eq(&self, other: &&str) -> bool {
        self.as_str() == *other
    }
}

impl fmt::Display for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostKey({:?})", self.as_str())
    }
}
