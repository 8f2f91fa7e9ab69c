//! What the rules are held against: one kind of gate, with hosts of each rule's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::Request;
use tokio::time::sleep;
use tower::Layer as _;
use tower_host_gate::{HostGate, HostGateLayer, HostSnapshot, Queue, Redis};

use super::differences::{self, Difference};
use super::events::Events;
use super::eventually;
use super::provider::Provider;
use super::support::script::get;

/// Where the state of a gate is kept.
#[derive(Clone)]
pub enum Store {
    InProcess,
    Shared { open: Arc<dyn Fn() -> Redis + Send + Sync>, queue: Queue },
}

/// One rule's own hosts at such a gate.
pub struct Backend {
    store: Store,
    rule: &'static str,
    /// How many gates were made, which have nothing to do with each other.
    gates: AtomicUsize,
    /// What the last one of them has told.
    pub events: Events,
}

impl Backend {
    pub fn new(store: Store, rule: &'static str) -> Self {
        Self { store, rule, gates: AtomicUsize::new(0), events: Events::default() }
    }

    /// A gate that nobody has used yet, in so many processes: clones of one layer where it is in process, else layers that
    /// have nothing in common but the store.
    pub async fn replicas<const N: usize>(&self, layer: HostGateLayer) -> [HostGateLayer; N] {
        self.replicas_with(layer, |redis| redis).await
    }

    /// [`replicas`](Self::replicas), with settings that only a shared gate has.
    pub async fn replicas_with<const N: usize>(
        &self,
        layer: HostGateLayer,
        set: impl Fn(Redis) -> Redis,
    ) -> [HostGateLayer; N] {
        let gate = self.gates.fetch_add(1, Ordering::Relaxed);
        let layer = layer.observer(self.events.clone());
        let layers = std::array::from_fn(|_| match &self.store {
            Store::InProcess => layer.clone(),
            Store::Shared { open, queue } => {
                // No rule here is about a slow store, and a busy machine is slow.
                let redis =
                    open().scope(&format!("{} {gate}", self.rule)).queue(*queue).timeout(Duration::from_secs(10));
                layer.clone().shared(set(redis))
            }
        });
        let failures = self.events.failures();
        for layer in &layers {
            self.connect(layer).await;
        }
        self.events.forget_but_failures(failures);
        layers
    }

    pub async fn layer(&self, layer: HostGateLayer) -> HostGateLayer {
        let [layer] = self.replicas(layer).await;
        layer
    }

    /// As many programs that fetch from this provider.
    pub async fn clients<const N: usize>(&self, provider: &Provider, layer: HostGateLayer) -> [HostGate<Provider>; N] {
        self.replicas(layer).await.map(|layer| layer.layer(provider.clone()))
    }

    /// A gate is usable without its store; a rule is about one that has it.
    async fn connect(&self, layer: &HostGateLayer) {
        if matches!(self.store, Store::InProcess) {
            return;
        }
        while layer.hosts().get_shared(&self.host()).await.is_err() {
            sleep(Duration::from_millis(10)).await;
        }
    }

    // --- the rule's host ------------------------------------------------------------------------------------------

    fn name(&self) -> String {
        format!("{}.example", self.rule.replace('_', "-"))
    }

    /// The key of the rule's host.
    pub fn host(&self) -> String {
        format!("{}:80", self.name())
    }

    /// A `GET` from the rule's host.
    pub fn get(&self, path: &str) -> Request<()> {
        get(&format!("http://{}{path}", self.name()))
    }

    /// What is known of the rule's host where its state is kept. `None`: nothing.
    pub async fn known(&self, layer: &HostGateLayer) -> Option<HostSnapshot> {
        match self.store {
            Store::InProcess => layer.hosts().get(&self.host()),
            Store::Shared { .. } => layer.hosts().get_shared(&self.host()).await.expect("the store answers"),
        }
    }

    /// Waits until this is known of the host: what a process has to report it reports behind the caller's back.
    pub async fn until(&self, layer: &HostGateLayer, what: &str, is_so: impl Fn(Option<&HostSnapshot>) -> bool) {
        for _ in 0..2_000 {
            if is_so(self.known(layer).await.as_ref()) {
                return;
            }
            sleep(Duration::from_millis(5)).await;
        }
        panic!("never: {what}; known is {:?}", self.known(layer).await);
    }

    /// Waits until nothing is in flight any more, and so everything is reported.
    pub async fn settled(&self, layer: &HostGateLayer) {
        self.until(layer, "nothing is in flight", |host| host.is_none_or(|host| host.in_flight == 0)).await;
    }

    /// The first of these processes clears the host; until all of them know.
    pub async fn clear(&self, layers: &[HostGateLayer]) {
        layers[0].hosts().clear(&self.host());
        let is_forgotten = |host: Option<&HostSnapshot>| host.is_none_or(|host| host.warm.is_zero());
        self.until(&layers[0], "the host is forgotten", is_forgotten).await;
        eventually("every process forgets the host", || {
            layers.iter().all(|layer| is_forgotten(layer.hosts().get(&self.host()).as_ref()))
        })
        .await;
    }

    /// How many wait in all of these processes.
    pub fn queued(&self, layers: &[HostGateLayer]) -> usize {
        let apart = match self.store {
            Store::InProcess => &layers[..1],
            Store::Shared { .. } => layers,
        };
        apart.iter().filter_map(|layer| layer.hosts().get(&self.host())).map(|host| host.queued).sum()
    }

    // --- differences ----------------------------------------------------------------------------------------------

    /// How the rule at hand differs here, by design.
    pub fn difference(&self) -> Option<&'static Difference> {
        differences::of(self.rule, &self.store)
    }

    pub fn differs(&self) -> bool {
        self.difference().is_some()
    }
}
