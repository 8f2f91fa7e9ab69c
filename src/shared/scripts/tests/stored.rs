//! What may be stored of a host: anything that can be read, and more often than not what the rules tell from its neighbour.

use proptest::prelude::*;

/// A clock that has run for half a century, as the server's has.
pub(super) const NOW: u64 = 1_700_000_000_000;

/// Milliseconds on a grid, where instants meet.
pub(super) fn any_span() -> BoxedStrategy<u64> {
    let on_grid = (1..5_u64).prop_map(|steps| 500 * steps);
    prop_oneof![2 => Just(0), 8 => on_grid, 2 => Just(130_000), 1 => 0..200_000_u64].boxed()
}

fn any_instant() -> BoxedStrategy<u64> {
    let ago = prop_oneof![5 => any_span(), 1 => 0..2_000_000_u64, 1 => 0..NOW];
    let ahead = prop_oneof![5 => any_span(), 1 => 0..2_000_000_u64, 1 => 0..1_u64 << 52];
    prop_oneof![
        3 => Just(0),
        1 => Just((1 << 53) - 1),
        8 => ago.prop_map(|ago| NOW - ago),
        4 => ahead.prop_map(|ahead| NOW + ahead),
    ]
    .boxed()
}

fn any_word() -> BoxedStrategy<u64> {
    let most = u32::MAX.into();
    prop_oneof![2 => Just(0), 6 => any_span(), 4 => 0..40_u64, 2 => 0..200_000_u64, 1 => Just(most), 1 => 0..=most]
        .boxed()
}

fn any_count(most: u64) -> BoxedStrategy<u64> {
    prop_oneof![6 => 0..4_u64, 2 => 4..20_u64, 1 => 126..130_u64, 1 => most - 2..=most, 1 => 0..=most].boxed()
}

pub(super) fn any_text() -> impl Strategy<Value = String> {
    let (short, byte) = (|| any_count(u16::MAX.into()), || any_count(u8::MAX.into()));
    let streak = prop_oneof![8 => 0..5_u64, 1 => Just(255), 1 => any_count(u32::MAX.into())];
    let common = ([any_instant(), any_instant(), any_instant(), any_instant()], streak);
    let lesson =
        ([any_instant(), any_instant(), any_instant()], [any_word(), any_word(), any_word(), any_word(), any_word()]);
    let counts = ([short(), short(), short()], [byte(), byte(), byte(), byte()], 0..512_u64);
    (common, lesson, counts).prop_map(|((limits, streak), (instants, words), (shorts, bytes, flags))| {
        let parts = [&limits[..], &[streak], &instants, &words, &shorts, &bytes, &[flags]].concat();
        parts.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
    })
}

/// As reactive pacing stores it.
pub(super) fn without_lesson(text: &str) -> String {
    let common: Vec<_> = text.split(' ').take(5).collect();
    common.join(" ") + &" 0".repeat(16)
}
