//! What is made of the client's errors.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::io;

use redis::parse_redis_value;

use super::*;

/// As the server sends it.
fn reply(text: &str) -> BackendError {
    let value = parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap();
    value.extract_error().unwrap_err().into()
}

#[test]
fn a_reply_is_told_by_its_code_or_by_the_code_in_its_text() {
    use BackendErrorKind::{Loading, MasterDown, OutOfMemory, ReadOnly, Reply, Unsupported};
    let hidden = "ERR Error running script (call to f_0123): @user_script:3: @user_script: 3: ";
    for (text, kind) in [
        ("LOADING Redis is loading the dataset in memory", Loading),
        ("READONLY You can't write against a read only replica.", ReadOnly),
        ("READONLY You can't write against a read only replica. script: 01, on @user_script:1.", ReadOnly),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", MasterDown),
        ("CLUSTERDOWN Hash slot not served", MasterDown),
        ("OOM command not allowed when used memory > 'maxmemory'.", OutOfMemory),
        ("MOVED 1234 10.0.0.7:7000", Unsupported),
        ("ERR unknown command 'EVALSHA', with args beginning with: 'secret'", Unsupported),
        ("ERR Unknown Redis command called from script script: 01", Unsupported),
        ("ERR This Redis command is not allowed from script script: 01", Unsupported),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", Reply),
        ("NOPERM this user has no permissions to run the 'time' command", Reply),
        ("WRONGPASS invalid username-password pair or user is disabled.", Reply),
        ("ERR wrong number of arguments for 'OOM' command, key 'READONLY'", Reply),
        ("BUSY Redis is busy running a script.", Reply),
    ] {
        assert_eq!(reply(text).kind(), kind, "{text}");
    }
    for (text, kind) in [
        ("-READONLY You can't write against a read only replica.", ReadOnly),
        ("-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", MasterDown),
        ("-LOADING Redis is loading the dataset in memory", Loading),
        ("-OOM command not allowed when used memory > 'maxmemory'.", OutOfMemory),
        ("Write commands not allowed after non deterministic commands. Call redis.replicate_commands()", Unsupported),
        ("This Redis command is not allowed from scripts", Unsupported),
        ("Unknown Redis command called from Lua script", Unsupported),
        ("-WRONGTYPE Operation against a key holding the wrong kind of value", Reply),
    ] {
        assert_eq!(reply(&format!("{hidden}{text}")).kind(), kind, "{text}");
    }
}

#[test]
fn an_error_of_the_connection_is_none_of_the_servers() {
    for (error, kind) in [
        (io::ErrorKind::ConnectionRefused, BackendErrorKind::Unreachable),
        (io::ErrorKind::BrokenPipe, BackendErrorKind::Unreachable),
        (io::ErrorKind::HostUnreachable, BackendErrorKind::Unreachable),
        (io::ErrorKind::InvalidData, BackendErrorKind::Unreachable),
        (io::ErrorKind::TimedOut, BackendErrorKind::Timeout),
    ] {
        let converted = BackendError::from(RedisError::from(io::Error::from(error)));
        assert_eq!(converted.kind(), kind, "{error:?}");
    }
    let junk = parse_redis_value(b"HTTP/1.1 400 Bad Request\r\n").unwrap_err();
    assert_eq!(BackendError::from(junk).kind(), BackendErrorKind::Unreachable);
    let old = RedisError::from((ErrorKind::RESP3NotSupported, "no HELLO"));
    assert_eq!(BackendError::from(old).kind(), BackendErrorKind::Unsupported);
    let unknown = RedisError::from((ErrorKind::MasterNameNotFoundBySentinel, "nobody"));
    assert_eq!(BackendError::from(unknown).kind(), BackendErrorKind::MasterDown);
}

#[test]
fn a_text_is_bounded_and_on_one_line() {
    let long = BackendError::from(RedisError::from(io::Error::other("é".repeat(1000))));
    assert!(long.to_string().chars().count() <= LONGEST + "unreachable: ".len());
    assert!(long.to_string().contains("éé"));

    let controls = BackendError::from(RedisError::from(io::Error::other("a\r\nb\u{1b}[31mc\u{9b}")));
    assert_eq!(controls.to_string(), r"unreachable: a\r\nb\u{1b}[31mc\u{9b}");
    let many = BackendError::from(RedisError::from(io::Error::other("\n".repeat(1000))));
    assert_eq!(many.text.chars().count(), LONGEST);
}

#[test]
fn a_text_has_no_secrets() {
    let hello = reply("ERR unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'default' 's3cret' ");
    assert_eq!(hello.to_string(), "unsupported: ERR unknown command 'HELLO'");

    for (text, shown) in [
        ("no route to redis://u:s3cret@host:1/2, sorry", "no route to redis://host:1/2, sorry"),
        ("redis://:s3cret@a and rediss://s3cret:s3c@ret@b", "redis://a and rediss://b"),
        ("redis://a:1 of me@b", "redis://a:1 of me@b"),
    ] {
        let error = BackendError::from(RedisError::from(io::Error::other(text)));
        assert_eq!(error.text, shown);
    }
}

#[test]
fn the_public_errors_can_be_passed_around() {
    fn is_an_error<T: Error + Send + Sync + Clone + 'static>() {}
    is_an_error::<BackendError>();
    is_an_error::<InvalidRedis>();
    assert_eq!(BackendError::new(BackendErrorKind::LeaseExpired, "late").to_string(), "lease-expired: late");
}
