//! What healthy hosts and layers leave behind on the heap.
//!
//! The memory that the fast path works in is never given back to the system, but to the next layer. Tests that run beside
//! these may have taken it, so there is room for a few such pieces of half a MiB each where layers are made.

use allocation_counter::measure;

use super::*;

const A_FEW_PIECES: i64 = 8 * 1024 * 1024;
/// Room that a near-empty map may keep, however many hosts it has seen.
const NEAR_EMPTY: i64 = 256 * 1024;

#[test]
fn a_hundred_thousand_healthy_hosts_leave_nothing_behind() {
    let layer = HostGateLayer::new();
    let mut client = layer.layer(AtOnce);
    drop(send(&mut client, URI));
    let memory = measure(|| {
        for n in 0..100_000 {
            drop(send(&mut client, format!("https://h{n}.example/")).unwrap());
        }
    });
    assert_eq!((memory.count_current, memory.bytes_current), (0, 0), "{memory:?}");
    assert!(memory.bytes_max < 4096, "{memory:?}");
}

/// So many that hosts want the same piece of memory again and again.
#[test]
fn a_hundred_thousand_healthy_hosts_a_thousand_at_a_time_leave_nothing_behind() {
    let layer = HostGateLayer::new();
    let mut client = layer.layer(AtOnce);
    let mut held: Vec<_> = (0..1000).map(|_| None).collect();
    held[0] = send(&mut client, URI);
    let memory = measure(|| {
        for n in 0..100_000 {
            held[n % 1000] = Some(send(&mut client, format!("https://h{n}.example/")).unwrap());
        }
        assert_eq!(layer.hosts().snapshot().len(), 1000);
        held.fill_with(|| None);
    });
    assert_eq!(layer.hosts().snapshot(), []);
    assert!(memory.bytes_current < NEAR_EMPTY, "{memory:?}");
}

#[test]
fn thousands_of_layers_in_turn_do_not_pile_up() {
    let mut held = None;
    let memory = measure(|| {
        for n in 0..2000 {
            let layer = HostGateLayer::new();
            let mut client = layer.layer(AtOnce);
            let response = send(&mut client, URI).unwrap();
            // Every other one is outlived by its response, until the next layer has one.
            drop(std::mem::replace(&mut held, (n % 2 == 0).then_some(response)));
        }
        drop(held.take());
    });
    assert!(memory.bytes_current < A_FEW_PIECES, "{memory:?}");
}

#[test]
fn a_layer_that_is_never_asked_has_no_room_for_hosts() {
    let memory = measure(|| {
        let layer = HostGateLayer::new();
        let _client = layer.layer(AtOnce);
        assert_eq!(layer.hosts().snapshot(), []);
    });
    assert!(memory.bytes_max < 8192, "{memory:?}");
    assert_eq!(memory.count_current, 0, "{memory:?}");
}
