//! Header values with something wrong in them, for the tests of both parsers.

use proptest::prelude::*;

/// A valid value with some bytes put in, taken out and replaced.
pub(super) fn mutated(
    valid: &[&'static str],
    byte: impl Strategy<Value = u8>,
    edits: usize,
) -> impl Strategy<Value = Vec<u8>> {
    let edit = (any::<prop::sample::Index>(), 0..3_u8, byte);
    (prop::sample::select(valid.to_vec()), prop::collection::vec(edit, 0..edits)).prop_map(|(value, edits)| {
        let mut bytes = value.as_bytes().to_vec();
        for (index, edit, byte) in edits {
            // One past the end too, where only an insertion does anything.
            let at = index.index(bytes.len() + 1);
            match edit {
                0 => bytes.insert(at, byte),
                1 => bytes.iter_mut().skip(at).take(1).for_each(|old| *old = byte),
                _ => drop(bytes.splice(at..bytes.len().min(at + 1), [])),
            }
        }
        bytes
    })
}
