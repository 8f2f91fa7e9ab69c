//! Who can ask a gate for permits.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::Gate;
use crate::config::Config;

/// What layers, services and the rest of the crate's own types have of a gate. With the last one the gate closes: what is
/// in flight or waiting goes on to its end, and nobody else comes.
#[derive(Clone)]
pub(crate) struct Handle(Arc<Open>);

struct Open(Arc<Gate>);

impl Handle {
    pub(crate) fn new(config: Config) -> Self {
        Self(Arc::new(Open(Gate::new(config))))
    }
}

impl Deref for Handle {
    type Target = Arc<Gate>;

    #[inline]
    fn deref(&self) -> &Arc<Gate> {
        &self.0.0
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.0.fmt(f)
    }
}
