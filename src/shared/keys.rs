//! The names under which a host is kept.
//!
//! `{prefix}:1:{scope}:{<host>}` and the same with a suffix: only the host is in braces, so that all keys of a host lie in
//! one slot of a cluster. Different hosts, scopes and prefixes never meet: what could be taken for a separator is escaped,
//! and a host that is too long goes by its digest.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

use crate::host::HostKey;

/// Of what is stored, so that a later version cannot misread it.
const FORMAT: u32 = 1;
/// The longest host that is written out.
const LONGEST: usize = 200;

/// Where a scope's keys begin.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    base: String,
}

/// The keys of one host: state, leases, sends, tickets, and who looks for a permit.
pub(crate) type Keys = [String; 5];

impl Space {
    pub(crate) fn new(prefix: &str, scope: &str) -> Self {
        let mut base = escaped(prefix, |byte| byte.is_ascii_graphic() && !b"{}%".contains(&byte));
        let _ = write!(base, ":{FORMAT}:");
        base += &escaped(scope, |byte| byte.is_ascii_graphic() && !b"{}%:".contains(&byte));
        Self { base }
    }

    pub(crate) fn keys(&self, host: &HostKey) -> Keys {
        let state = self.state(host);
        let [leases, sends, tickets, seekers] = ["l", "q", "t", "w"].map(|suffix| format!("{state}:{suffix}"));
        [state, leases, sends, tickets, seekers]
    }

    /// The key of a host's state.
    pub(crate) fn state(&self, host: &HostKey) -> String {
        let host = host.as_str();
        let name = escaped(host, |byte| byte.is_ascii_graphic() && !b"{}%~".contains(&byte));
        let name = if name.len() > LONGEST { digest(host) } else { name };
        format!("{}:{{{name}}}", self.base)
    }

    /// Where processes listen: what follows is a process, or all of them.
    pub(crate) fn channel(&self) -> String {
        format!("{}:!", self.base)
    }
}

/// An escaped name has no tilde.
fn digest(host: &str) -> String {
    Sha256::digest(host.as_bytes()).iter().fold("~".to_owned(), |mut name, byte| {
        let _ = write!(name, "{byte:02x}");
        name
    })
}

/// Percent-encodes every byte that is not plain. An empty text is a lone percent sign: a pair of braces with nothing in
/// between is no hash tag.
fn escaped(text: &str, plain: impl Fn(u8) -> bool) -> String {
    if text.is_empty() {
        return "%".to_owned();
    }
    text.bytes().fold(String::with_capacity(text.len()), |mut escaped, byte| {
        if plain(byte) {
            escaped.push(char::from(byte));
        } else {
            let _ = write!(escaped, "%{byte:02X}");
        }
        escaped
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(prefix: &str, scope: &str, host: &str) -> String {
        Space::new(prefix, scope).state(&HostKey::new(host))
    }

    /// What a cluster hashes: what is between the first brace and the first closing one behind it.
    fn tag(key: &str) -> Option<&str> {
        let (_, rest) = key.split_once('{')?;
        let (tag, _) = rest.split_once('}')?;
        (!tag.is_empty()).then_some(tag)
    }

    #[test]
    fn an_ordinary_host_can_be_read() {
        assert_eq!(key("host-gate", "feeds", "a.example:443"), "host-gate:1:feeds:{a.example:443}");
        assert_eq!(key("my:app", "feeds", "[::1]:80"), "my:app:1:feeds:{[::1]:80}");
    }

    #[test]
    fn d23_what_would_collide_when_joined_does_not() {
        assert_ne!(key("p", "1:s", "h"), key("p:1", "s", "h"));
        assert_ne!(key("p", "a:b", "c"), key("p", "a", "b:c"));
        assert_ne!(key("p", "a", "x%20y"), key("p", "a", "x y"));
        assert_ne!(key("p", "", "x"), key("p", "%", "x"));
    }

    #[test]
    fn d23_a_long_host_goes_by_its_digest() {
        let (a, b) = ("a".repeat(5000), format!("{}b", "a".repeat(4999)));
        assert!(key("p", "s", &a).len() < 100);
        assert_ne!(key("p", "s", &a), key("p", "s", &b));
        assert_ne!(key("p", "s", &a), key("p", "s", tag(&key("p", "s", &a)).unwrap_or_default()));
    }

    #[test]
    fn d03_an_empty_host_has_a_hash_tag_all_the_same() {
        assert_eq!(key("p", "s", ""), "p:1:s:{%}");
    }

    proptest! {
        #[test]
        fn d03_all_keys_of_a_host_lie_in_one_slot_by_our_own_tag(prefix: String, scope: String, host: String) {
            let space = Space::new(&prefix, &scope);
            let keys = space.keys(&HostKey::new(host.as_str()));
            let first = tag(&keys[0]).map(str::to_owned);
            prop_assert!(first.is_some());
            for key in &keys {
                prop_assert_eq!(tag(key).map(str::to_owned), first.clone());
                prop_assert!(key.bytes().all(|byte| byte.is_ascii_graphic()), "{}", key);
            }
        }

        #[test]
        fn d23_keys_are_injective(a: (String, String, String), b: (String, String, String)) {
            let same = HostKey::new(a.2.as_str()) == HostKey::new(b.2.as_str()) && a.0 == b.0 && a.1 == b.1;
            prop_assert_eq!(key(&a.0, &a.1, &a.2) == key(&b.0, &b.1, &b.2), same);
        }
    }
}
