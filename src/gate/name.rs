//! A host as the fast path handles it: a few words, which can be hashed, kept in a cell and made a key of again.
//!
//! The words of a name overlap: four words hold every text of 16 to 32 bytes, its first and its last 16. So nothing is
//! copied in a loop, whatever the length.

use std::hash::{BuildHasher, Hasher};

use http::Uri;

use crate::host::{By, HostKey};

/// How many words a name is kept in.
pub(super) const WORDS: usize = 8;
/// The longest text that fits them.
const LONGEST: usize = 8 * WORDS - 2;
/// Stands in for words that a short text does not fill. Nothing in it makes a text odd.
const PAD: u64 = all(b'-');

/// The text of a key without a default port, and that port: one name for each key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name<'a> {
    text: &'a [u8],
    port: Port,
}

/// What follows the text in the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Port {
    None = 0,
    Http = 1,
    Https = 2,
}

/// A name in a cell.
pub(super) type Words = [u64; WORDS];

/// Length and port of a name in a cell: what its words do not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) len: u8,
    pub(super) port: u8,
}

impl<'a> Name<'a> {
    /// The name of the host that a request asks, if its authority is a key's text as it stands: in lower case, without user
    /// info, an address in brackets, or a port that is written oddly. Everything else takes [`By`]'s way.
    #[inline]
    pub(super) fn plain(uri: &'a Uri, by: By) -> Option<Self> {
        let text = uri.authority()?.as_str().as_bytes();
        if text.len() < 4 || text.len() > 32 {
            return None;
        }
        if is_odd(four(text)) {
            return Self::with_port(text, by);
        }
        if text[text.len() - 1] == b'.' {
            return None;
        }
        let port = match by {
            By::Host => Port::None,
            By::Authority => match uri.scheme_str() {
                Some("https") => Port::Https,
                Some("http") => Port::Http,
                // Rare enough to have its port looked up.
                Some(_) => return None,
                None => Port::None,
            },
        };
        Some(Self { text, port })
    }

    /// The same for an authority that has a port.
    fn with_port(text: &'a [u8], by: By) -> Option<Self> {
        let colon = text.iter().position(|byte| *byte == b':')?;
        let (host, port) = (&text[..colon], &text[colon + 1..]);
        let is_plain = |byte: &u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.');
        if by != By::Authority || !host.iter().all(is_plain) || matches!(host.last(), None | Some(b'.')) {
            return None;
        }
        match port {
            b"80" => Some(Self { text: host, port: Port::Http }),
            b"443" => Some(Self { text: host, port: Port::Https }),
            // Five digits may be more than a port can be.
            [b'1'..=b'9', rest @ ..] if rest.len() < 4 && rest.iter().all(u8::is_ascii_digit) => {
                Some(Self { text, port: Port::None })
            }
            [b'1'..=b'5', rest @ ..] if rest.len() == 4 && rest.iter().all(u8::is_ascii_digit) => {
                Some(Self { text, port: Port::None })
            }
            _ => None,
        }
    }

    #[inline]
    pub(super) fn of(key: &'a HostKey) -> Self {
        let text = key.as_str().as_bytes();
        for (port, suffix) in [(Port::Https, b":443".as_slice()), (Port::Http, b":80")] {
            if let Some(text) = text.strip_suffix(suffix) {
                return Self { text, port };
            }
        }
        Self { text, port: Port::None }
    }

    #[inline]
    pub(super) fn hash(&self, seed: &impl BuildHasher) -> u64 {
        let mut hasher = seed.build_hasher();
        let pair = |a: u64, b: u64| u128::from(a) | u128::from(b) << 64;
        if self.text.len() <= 32 {
            let [a, b, c, d] = four(self.text);
            hasher.write_u128(pair(a, b));
            hasher.write_u128(pair(c, d));
        } else {
            hasher.write(self.text);
        }
        hasher.write_u64((self.text.len() as u64) << 8 | self.port as u64);
        hasher.finish()
    }

    /// How it is kept in a cell, if it is short enough.
    #[inline]
    pub(super) fn shape(&self) -> Option<Shape> {
        (self.text.len() <= LONGEST).then_some(Shape { len: self.text.len() as u8, port: self.port as u8 })
    }

    pub(super) fn key(&self) -> HostKey {
        // Invariant: it is part of a key or an authority.
        key(std::str::from_utf8(self.text).unwrap_or_default(), self.port as u8)
    }

    /// Its words, one by one, with their places.
    #[inline]
    pub(super) fn each_word(&self, mut put: impl FnMut(usize, u64)) {
        if self.text.len() <= 32 {
            four(self.text).into_iter().enumerate().for_each(|(place, word)| put(place, word));
        } else if let (Some(first), Some(last)) = (self.text.first_chunk::<32>(), self.text.last_chunk::<32>()) {
            let words = first.chunks_exact(8).chain(last.chunks_exact(8));
            words.enumerate().for_each(|(place, bytes)| put(place, word(bytes)));
        }
    }
}

impl Shape {
    /// The key of a name with these words.
    pub(super) fn key(self, words: &Words) -> HostKey {
        let len = usize::from(self.len).min(LONGEST);
        let mut bytes = [0; 8 * WORDS];
        let mut put =
            |at: usize, word: u64, len: usize| bytes[at..at + len].copy_from_slice(&word.to_le_bytes()[..len]);
        match len {
            0..4 => put(0, words[0], len),
            4..8 => {
                put(0, words[0], 4);
                put(len - 4, words[0] >> 32, 4);
            }
            8..16 => {
                put(0, words[0], 8);
                put(len - 8, words[1], 8);
            }
            _ => {
                let half = if len <= 32 { 2 } else { 4 };
                for place in 0..half {
                    put(8 * place, words[place], 8);
                    put(len - 8 * (half - place), words[half + place], 8);
                }
            }
        }
        // Invariant: the words are those of a key's text.
        key(std::str::from_utf8(&bytes[..len]).unwrap_or_default(), self.port)
    }
}

fn key(text: &str, port: u8) -> HostKey {
    const HTTP: u8 = Port::Http as u8;
    const HTTPS: u8 = Port::Https as u8;
    let suffix = match port {
        HTTP => ":80",
        HTTPS => ":443",
        _ => "",
    };
    HostKey::of_parts(text, suffix)
}

/// The words of a text of up to 32 bytes.
#[inline]
fn four(text: &[u8]) -> [u64; 4] {
    if let (Some(first), Some(last)) = (text.first_chunk::<16>(), text.last_chunk::<16>()) {
        let ([a, b], [c, d]) = (two(first), two(last));
        [a, b, c, d]
    } else if let (Some(first), Some(last)) = (text.first_chunk::<8>(), text.last_chunk::<8>()) {
        [word(first), word(last), PAD, PAD]
    } else if let (Some(first), Some(last)) = (text.first_chunk::<4>(), text.last_chunk::<4>()) {
        [u64::from(u32::from_le_bytes(*first)) | u64::from(u32::from_le_bytes(*last)) << 32, PAD, PAD, PAD]
    } else {
        [text.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)), PAD, PAD, PAD]
    }
}

#[inline]
fn two(bytes: &[u8; 16]) -> [u64; 2] {
    let both = u128::from_le_bytes(*bytes);
    [both as u64, (both >> 64) as u64]
}

#[inline]
fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// Whether any of these ASCII bytes lies from `:` to `_`, where all those are that [`By`] has to look at: capital letters,
/// the colon, `@`, `[` and `]`.
#[inline]
fn is_odd(words: [u64; 4]) -> bool {
    // A sum's high bit says whether the byte is at least the one that completes 128: the first, or the one behind the last.
    let odd = |word: u64| word.wrapping_add(all(0x80 - b':')) & !word.wrapping_add(all(0x7f - b'_'));
    words.into_iter().fold(0, |any, word| any | odd(word)) & all(0x80) != 0
}

const fn all(byte: u8) -> u64 {
    u64::from_le_bytes([byte; 8])
}

#[cfg(test)]
mod tests {
    use http::{Extensions, HeaderMap};
    use proptest::prelude::*;

    use super::*;
    use crate::host::Keying;

    fn kept(name: &Name<'_>) -> Option<HostKey> {
        let mut words = [0; WORDS];
        name.each_word(|place, word| words[place] = word);
        Some(name.shape()?.key(&words))
    }

    proptest! {
        #[test]
        fn a_key_comes_out_of_a_cell_as_it_went_in(text in "[a-z0-9.:_\\\\\n\\[\\]~-]{0,70}") {
            let key = HostKey::new(&text);
            let name = Name::of(&key);
            prop_assert_eq!(kept(&name), (name.text.len() <= LONGEST).then_some(key));
        }

        #[test]
        fn a_plain_name_is_that_of_the_key(scheme in "(https?|wss?|ftp)", text in "([a-zA-Z0-9.:@_%-]{1,40}|[a-z.]{1,9}:[0-9]{1,6})", by_host: bool) {
            let Ok(uri) = format!("{scheme}://{text}/feed").parse::<Uri>() else { return Ok(()) };
            let by = if by_host { By::Host } else { By::Authority };
            if let Some(plain) = Name::plain(&uri, by) {
                let key = by.key(&uri, &HeaderMap::new(), &Extensions::new()).unwrap();
                prop_assert_eq!(plain, Name::of(&key));
            }
        }

        #[test]
        fn different_keys_have_different_names(a in "[a-c:0-9]{0,40}(:80|:443|)", b in "[a-c:0-9]{0,40}(:80|:443|)") {
            let (a, b) = (HostKey::new(a), HostKey::new(b));
            prop_assert_eq!(a == b, Name::of(&a) == Name::of(&b));
        }
    }

    #[test]
    fn ordinary_hosts_are_plain() {
        for uri in [
            "https://example.com/",
            "http://feeds.example.org/",
            "https://t.co/x",
            "http://192.0.2.7/feed",
            "http://localhost:8080/",
            "http://127.0.0.1:54321/",
        ] {
            assert!(Name::plain(&uri.parse().unwrap(), By::Authority).is_some(), "{uri}");
        }
    }
}
