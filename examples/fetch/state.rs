//! What one run leaves to the next: a file of what the hosts have taught.
//!
//! It is worth having and nothing depends on it. Whatever is wrong with it costs a line on stderr, and the run begins as
//! the first one did.

use std::io::{self, BufWriter, ErrorKind, Write as _};
use std::path::Path;

use tempfile::NamedTempFile;
use tower_host_gate::{Hosts, HostsState};

/// Tells the gate what the last run has learnt.
pub(crate) fn load(file: &Path, hosts: &Hosts) {
    match read(file) {
        Ok(state) => hosts.import(state),
        // The first run.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            eprintln!("warning: beginning without {}: {error}", file.display());
            put_aside(file);
        }
    }
}

/// What could not be read may be something else altogether: it is not to be overwritten.
fn put_aside(file: &Path) {
    let mut aside = file.as_os_str().to_owned();
    aside.push(".unread");
    if file.is_file() && std::fs::rename(file, &aside).is_ok() {
        eprintln!("warning: it is now {}", Path::new(&aside).display());
    }
}

fn read(file: &Path) -> io::Result<HostsState> {
    Ok(serde_json::from_slice(&std::fs::read(file)?)?)
}

/// Writes down what is known now.
pub(crate) fn save(file: &Path, hosts: &Hosts) {
    if let Err(error) = write(file, &hosts.export()) {
        eprintln!("warning: cannot write {}: {error}", file.display());
    }
}

/// The file gets its name when it is whole, so that no run, nor another one at the same time, ever reads half of it.
fn write(file: &Path, state: &HostsState) -> io::Result<()> {
    // In the same directory, or else it could not simply be renamed.
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut whole = BufWriter::new(NamedTempFile::new_in(directory)?);
    serde_json::to_writer_pretty(&mut whole, state)?;
    whole.flush()?;
    let whole = whole.into_inner()?;
    whole.as_file().sync_all()?;
    whole.persist(file)?;
    Ok(())
}
