//! What became of a URL.

use std::error::Error;
use std::io;
use std::iter;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use http::{Response, StatusCode, Uri};
use serde_json::{Value, json};
use tower::timeout::error::Elapsed;
use tower_host_gate::{HostKey, RateLimited, Throttled};
use tower_http::timeout::TimeoutError;

#[derive(Debug)]
pub(crate) enum Outcome {
    Fetched {
        status: StatusCode,
        bytes: u64,
        /// Where redirects have led to.
        from: Option<Uri>,
        file: Option<PathBuf>,
    },
    /// The gate did not send it: its host cannot admit it in time.
    Shed(RateLimited),
    /// The host has refused the last attempt.
    Throttled {
        status: StatusCode,
        host: String,
        throttled: Throttled,
    },
    /// Any other answer that is no success.
    Status(StatusCode),
    BadUrl(String),
    Failed {
        code: &'static str,
        message: String,
    },
}

impl Outcome {
    /// A response that is no success.
    pub(crate) fn refused<B>(response: &Response<B>, from: &Uri) -> Self {
        let status = response.status();
        match response.extensions().get::<Throttled>() {
            // Soft: a 403 that does not say when to come back means in all likelihood "never".
            Some(throttled) if !throttled.soft => {
                let host = from.to_string().parse::<HostKey>().map(|host| host.to_string()).unwrap_or_default();
                Self::Throttled { status, host, throttled: *throttled }
            }
            _ => Self::Status(status),
        }
    }

    /// An error of the client, or of reading the body.
    pub(crate) fn failed(error: &(dyn Error + 'static)) -> Self {
        // However deep it is wrapped.
        if let Some(limited) = RateLimited::find(error) {
            return Self::Shed(limited.clone());
        }
        let timed_out = causes(error).any(|cause| cause.is::<Elapsed>() || cause.is::<TimeoutError>());
        let message = causes(error).map(ToString::to_string).collect::<Vec<_>>().join(": ");
        Self::Failed { code: if timed_out { "TIMEOUT" } else { "TRANSPORT" }, message }
    }

    pub(crate) fn file(file: &Path, error: &io::Error) -> Self {
        Self::Failed { code: "FILE", message: format!("cannot write {}: {error}", file.display()) }
    }

    pub(crate) fn json(&self, url: &str) -> Value {
        match self {
            Self::Fetched { status, bytes, from, file } => {
                let mut line = json!({ "url": url, "status": status.as_u16(), "bytes": bytes });
                if let Some(from) = from {
                    line["from"] = from.to_string().into();
                }
                if let Some(file) = file {
                    line["file"] = file.display().to_string().into();
                }
                line
            }
            // With its feature `serde` the crate writes this form itself: `serde_json::to_value(limited)`.
            Self::Shed(limited) => json!({ "url": url, "error": {
                "code": limited.code(),
                "message": limited.to_string(),
                "details": {
                    "host": limited.host(),
                    "retry_after": whole_seconds(limited.retry_after()),
                    "asked": limited.asked().map(whole_seconds),
                    "raw_hint": limited.raw_hint(),
                    "reason": limited.reason().as_str(),
                    "status": limited.status().map(|status| status.as_u16()),
                    "streak": limited.streak(),
                },
            }}),
            Self::Throttled { status, host, throttled } => json!({ "url": url, "error": {
                "code": "RATE_LIMITED",
                "message": format!("{host} has refused every attempt, the last one with {status}"),
                "details": {
                    "host": host,
                    "retry_after": whole_seconds(throttled.retry_after),
                    "reason": "attempts",
                    "status": status.as_u16(),
                    "streak": throttled.streak,
                },
            }}),
            Self::Status(status) => error(url, "HTTP_STATUS", &status.to_string()),
            Self::BadUrl(message) => error(url, "BAD_URL", message),
            Self::Failed { code, message } => error(url, code, message),
        }
    }
}

/// As `--help` has it.
pub(crate) fn exit_code(outcomes: &[Outcome]) -> ExitCode {
    let code = |outcome: &Outcome| match outcome {
        Outcome::Fetched { .. } => 0,
        Outcome::Shed(_) | Outcome::Throttled { .. } => 3,
        Outcome::Status(_) | Outcome::BadUrl(_) | Outcome::Failed { .. } => 1,
    };
    let codes: Vec<u8> = outcomes.iter().map(code).collect();
    // To come back later would not help with what has failed.
    ExitCode::from(*[1, 3].iter().find(|code| codes.contains(code)).unwrap_or(&0))
}

fn error(url: &str, code: &str, message: &str) -> Value {
    json!({ "url": url, "error": { "code": code, "message": message } })
}

/// hyper says "client error (Connect)"; the cause below it says why.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |&cause| cause.source())
}

/// Rounded up: whoever comes back then does not come too early.
fn whole_seconds(time: Duration) -> u64 {
    time.as_secs().saturating_add(u64::from(time.subsec_nanos() > 0))
}
