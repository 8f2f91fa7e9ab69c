//! What the crate logs, as text.

use std::cell::RefCell;
use std::io;
use std::sync::{Arc, Mutex, Once};

/// What is logged on this thread while the guard lives.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

thread_local! {
    static CAPTURED: RefCell<Option<Log>> = const { RefCell::new(None) };
}

/// Ends the capture when dropped.
pub struct Capture(());

impl Log {
    /// All threads share one subscriber, which writes to the log of the thread it is called on. With a subscriber per
    /// thread, a thread that has none can decide for all of them that nobody wants to hear of an event.
    pub fn capture() -> (Self, Capture) {
        static SUBSCRIBE: Once = Once::new();
        SUBSCRIBE.call_once(|| {
            let subscriber = tracing_subscriber::fmt()
                .with_max_level(tracing::Level::TRACE)
                .with_ansi(false)
                .with_writer(|| CAPTURED.with_borrow(|log| log.clone().unwrap_or_default()))
                .finish();
            tracing::subscriber::set_global_default(subscriber).expect("nobody else subscribes");
            // For whoever has asked between the making of the subscriber and the line above.
            tracing::callsite::rebuild_interest_cache();
        });
        let log = Self::default();
        CAPTURED.set(Some(log.clone()));
        (log, Capture(()))
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.0.lock().expect("no writer panics").clone()).expect("a log is text")
    }

    /// How many lines are warnings.
    pub fn warnings(&self) -> usize {
        self.text().lines().filter(|line| line.contains(" WARN ")).count()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        CAPTURED.set(None);
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no writer panics").extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
