//! The link to the store: one connection, known to be there or known not to be.
//!
//! A call waits for nothing but its answer, and for that no longer than its timeout. Without a connection it is told so
//! at once:
//!
//! | state | a call |
//! |---|---|
//! | [`Idle`](State::Idle) | starts the dialler, and waits for its first attempt |
//! | [`Connecting`](State::Connecting) | waits for it too |
//! | [`Up`](State::Up) | is sent |
//! | [`Down`](State::Down) | fails; the dialler brings the link up again |
//!
//! A connection that is no good (broken, to a replica, two calls in a row without an answer) is dropped, and not looked
//! at again. The dialler is a task that exists only while there is none; a new one is let through to when it has been
//! tried.

mod connection;
mod dial;
mod target;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use redis::Value;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::timeout;

pub(crate) use self::connection::{Connection, Script};
use self::dial::Dialler;
pub(crate) use self::target::Target;
use super::error::{BackendError, BackendErrorKind};

/// What the link tells of itself. Its methods are quick, and do not panic.
pub(crate) trait Hooks: Send + Sync + 'static {
    /// Calls fail from now on: once per outage.
    fn degraded(&self, cause: &BackendError);

    /// Runs on each new connection before calls are let through to it. An error means that it is no good.
    fn recover<'a>(
        &'a self,
        connection: &'a Connection,
    ) -> Pin<Box<dyn Future<Output = Result<(), BackendError>> + Send + 'a>>;

    /// Calls are let through again: once per outage.
    fn recovered(&self, down_for: Duration);

    /// A message on one of the channels.
    fn pushed(&self, channel: &str, payload: &[u8]);
}

/// Whether there is a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// Nobody has asked for one yet.
    Idle,
    /// The first one is under way.
    Connecting,
    Up,
    Down,
}

/// The connection of this process to the store, or the lack of it.
pub(crate) struct Link {
    plan: Arc<Plan>,
    /// Of [`Inner::state`], for those who only look.
    state: AtomicU8,
    inner: Mutex<Inner>,
    /// The state is no longer [`State::Connecting`].
    turned: Notify,
    /// Held while the hooks hear of a change, so that they hear of all in their order.
    telling: Mutex<()>,
}

/// What a dialler has to know.
struct Plan {
    target: Target,
    timeout: Duration,
    channels: Vec<String>,
    hooks: Weak<dyn Hooks>,
    clock: ServerClock,
    /// The next connection's.
    epochs: AtomicU64,
}

struct Inner {
    state: State,
    connection: Option<Arc<Connection>>,
    /// Whose turn it is to dial.
    dialling: Option<u64>,
    turns: u64,
    dialler: Option<AbortHandle>,
    down_since: Instant,
    /// Why there was no first connection, for those who waited for it.
    cause: BackendError,
}

impl Link {
    pub(crate) fn new(target: Target, timeout: Duration, channels: Vec<String>, hooks: Weak<dyn Hooks>) -> Arc<Self> {
        let clock = ServerClock { base: Instant::now(), ahead: AtomicU64::new(0) };
        Arc::new(Self {
            plan: Arc::new(Plan { target, timeout, channels, hooks, clock, epochs: AtomicU64::new(0) }),
            state: AtomicU8::new(State::Idle as u8),
            inner: Mutex::new(Inner {
                state: State::Idle,
                connection: None,
                dialling: None,
                turns: 0,
                dialler: None,
                down_since: Instant::now(),
                cause: down(),
            }),
            turned: Notify::new(),
            telling: Mutex::new(()),
        })
    }

    pub(crate) fn state(&self) -> State {
        let state = self.state.load(Ordering::Acquire);
        [State::Idle, State::Connecting, State::Up, State::Down][usize::from(state)]
    }

    /// The server's clock now, as far as is known, in milliseconds; 0 before it was ever heard. A little late: an
    /// answer takes its time.
    pub(crate) fn server_now_ms(&self) -> u64 {
        self.plan.clock.now()
    }

    pub(crate) fn note_server_time(&self, ms: u64) {
        self.plan.clock.set(ms);
    }

    /// Runs a script.
    pub(crate) async fn run<K: AsRef<[u8]>>(
        self: &Arc<Self>,
        script: &Script,
        keys: &[K],
        args: &[Vec<u8>],
    ) -> Result<Value, BackendError> {
        let connection = self.lock().connection.clone();
        let connection = match connection {
            Some(connection) => connection,
            None if self.state() == State::Down => {
                self.dial();
                return Err(down());
            }
            None => self.first_connection().await?,
        };
        let answer = connection.run(script, keys, args).await;
        if connection.is_lost_by(answer.as_ref().err()) {
            if let Err(cause) = &answer {
                self.lost(connection.epoch, cause);
            }
        }
        answer
    }

    /// Waits for the first attempt, and no longer than for an answer.
    async fn first_connection(self: &Arc<Self>) -> Result<Arc<Connection>, BackendError> {
        let connection = async {
            loop {
                let mut turned = pin!(self.turned.notified());
                turned.as_mut().enable();
                self.dial();
                if let Some(outcome) = self.first_outcome() {
                    return outcome;
                }
                turned.await;
            }
        };
        match timeout(self.plan.timeout, connection).await {
            Ok(outcome) => outcome,
            Err(_) => {
                let error = BackendError::new(BackendErrorKind::Timeout, "no connection in time");
                self.not_connected(error.clone());
                Err(error)
            }
        }
    }

    fn first_outcome(&self) -> Option<Result<Arc<Connection>, BackendError>> {
        let inner = self.lock();
        match inner.state {
            State::Idle | State::Connecting => None,
            State::Up => inner.connection.clone().map(Ok),
            State::Down => Some(Err(inner.cause.clone())),
        }
    }

    // --- changes of the state -------------------------------------------------------------------------------------

    /// Sees to it that somebody dials, as long as there is no connection.
    fn dial(self: &Arc<Self>) {
        // Without a runtime nobody can; the next call may have one.
        let Ok(runtime) = Handle::try_current() else { return };
        let turn = {
            let mut inner = self.lock();
            if inner.connection.is_some() || inner.dialling.is_some() {
                return;
            }
            if inner.state == State::Idle {
                self.turn(&mut inner, State::Connecting);
            }
            inner.turns += 1;
            inner.dialling = Some(inner.turns);
            inner.turns
        };
        let dialler = Dialler { link: Arc::downgrade(self), plan: Arc::clone(&self.plan), turn };
        // Not under the lock: a runtime that shuts down drops the task at once.
        let task = runtime.spawn(dialler.dial()).abort_handle();
        self.lock().dialler = Some(task);
    }

    fn dialler_ended(&self, turn: u64) {
        let mut inner = self.lock();
        let unfinished = inner.dialling.take_if(|current| *current == turn).is_some();
        if unfinished && inner.state == State::Connecting {
            // Whoever waits may do it.
            self.turn(&mut inner, State::Idle);
        }
    }

    fn connected(&self, turn: u64, connection: Connection) {
        let _order = lock(&self.telling);
        let down_for = {
            let mut inner = self.lock();
            if inner.dialling.take_if(|current| *current == turn).is_none() {
                return;
            }
            inner.connection = Some(Arc::new(connection));
            let down_for = (inner.state == State::Down).then(|| inner.down_since.elapsed());
            self.turn(&mut inner, State::Up);
            down_for
        };
        if let Some(down_for) = down_for {
            if let Some(hooks) = self.plan.hooks.upgrade() {
                hooks.recovered(down_for);
            }
        }
    }

    /// An attempt failed, or takes longer than a call waits.
    fn not_connected(&self, cause: BackendError) {
        tracing::debug!(store = ?self.plan.target, error = %cause, "no connection to the store");
        let _order = lock(&self.telling);
        {
            let mut inner = self.lock();
            if inner.state != State::Connecting {
                return;
            }
            inner.cause = cause.clone();
            self.turn(&mut inner, State::Down);
        }
        self.degraded(&cause);
    }

    /// This connection is no good, if it is still ours.
    fn lost(self: &Arc<Self>, epoch: u64, cause: &BackendError) {
        {
            let _order = lock(&self.telling);
            let gone = {
                let mut inner = self.lock();
                let gone = inner.connection.take_if(|connection| connection.epoch == epoch);
                if gone.is_some() {
                    self.turn(&mut inner, State::Down);
                }
                gone
            };
            if gone.is_none() {
                return;
            }
            self.degraded(cause);
        }
        self.dial();
    }

    fn degraded(&self, cause: &BackendError) {
        tracing::warn!(store = ?self.plan.target, error = %cause, "the store is out of reach");
        if let Some(hooks) = self.plan.hooks.upgrade() {
            hooks.degraded(cause);
        }
    }

    fn turn(&self, inner: &mut Inner, state: State) {
        inner.state = state;
        if state == State::Down {
            inner.down_since = Instant::now();
        }
        self.state.store(state as u8, Ordering::Release);
        self.turned.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(dialler) = &self.lock().dialler {
            dialler.abort();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn down() -> BackendError {
    BackendError::new(BackendErrorKind::Down, "the store is known to be out of reach")
}

/// The server's clock, read off our own that never jumps.
struct ServerClock {
    base: Instant,
    /// By how much the server is ahead of the time since `base`; 0 while that is not known.
    ahead: AtomicU64,
}

impl ServerClock {
    fn set(&self, ms: u64) {
        self.ahead.store(ms.saturating_sub(self.elapsed()), Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        match self.ahead.load(Ordering::Relaxed) {
            0 => 0,
            ahead => ahead.saturating_add(self.elapsed()),
        }
    }

    fn elapsed(&self) -> u64 {
        u64::try_from(self.base.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
pub(super) mod tests;
