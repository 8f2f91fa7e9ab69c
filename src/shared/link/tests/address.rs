//! Addresses, as they are given.

use super::*;

fn shown(url: &str) -> String {
    format!("{:?}", Target::parse(url).unwrap_or_else(|error| panic!("{url}: {error}")))
}

#[test]
fn every_kind_of_address_is_understood() {
    for (url, place) in [
        ("redis://127.0.0.1/", "server 127.0.0.1:6379"),
        ("redis://user:pw@store:7000/3", "server store:7000"),
        ("rediss://[::1]:6380", "server ::1:6380"),
        ("valkey://store", "server store:6379"),
        ("redis+unix:///run/redis.sock", "server /run/redis.sock"),
        ("unix:///run/redis.sock", "server /run/redis.sock"),
        ("redis+sentinel://a,b:1234/main", r#"sentinel a:26379 b:1234 "main""#),
        ("redis+sentinel://:p%40ss@[::1],[::2]:5/main/2", r#"sentinel ::1:26379 ::2:5 "main""#),
        ("rediss+sentinel://a/main", r#"sentinel a:26379 "main""#),
        ("redis+cluster://u:p@a,b:7001", "cluster a:6379 b:7001"),
        ("rediss+cluster://a/", "cluster a:6379"),
    ] {
        assert_eq!(shown(url), place, "{url}");
    }
}

#[test]
fn lists_of_nodes_are_understood_too() {
    let nodes = |urls: &[&str]| urls.iter().map(|url| (*url).to_owned()).collect::<Vec<_>>();
    let sentinel = Target::sentinel(nodes(&["redis://a", "redis://b:1/"]), "main".to_owned()).unwrap();
    assert_eq!(format!("{sentinel:?}"), r#"sentinel a:26379 b:1 "main""#);
    let cluster = Target::cluster(nodes(&["redis://a", "redis://b:7001/"])).unwrap();
    assert_eq!(format!("{cluster:?}"), "cluster a:6379 b:7001");

    assert!(Target::sentinel(Vec::new(), "main".to_owned()).is_err());
    assert!(Target::sentinel(nodes(&["redis://a"]), String::new()).is_err());
    assert!(Target::cluster(Vec::new()).is_err());
    assert!(Target::cluster(nodes(&["redis://a", "rediss://b"])).is_err(), "with TLS and without");
    assert!(Target::cluster(nodes(&["unix:///run/redis.sock"])).is_err());
    assert!(Target::cluster(nodes(&["redis+sentinel://a/main"])).is_err());
}

#[test]
fn an_error_says_what_is_wrong_and_never_the_password() {
    for (url, word) in [
        ("", "redis://"),
        ("s3cret", "redis://"),
        ("http://u:s3cret@host/", "redis://"),
        ("s3cret://host/", "redis://"),
        ("redis+proxy://u:s3cret@host/", "redis://"),
        ("http+cluster://u:s3cret@host/", "redis://"),
        ("redis://u:s3cret@", "cannot be read"),
        ("redis://u:s3cret@host:port/", "cannot be read"),
        ("redis://u:s3c/ret@host/s3cret", "cannot be read"),
        ("redis://u:s3cret@host/s3cret", "database"),
        ("redis://u:s3cret@host/?protocol=s3cret", "protocol"),
        ("redis://u:s3cret@a,b/", "redis+cluster://"),
        ("redis://u:s3cret@0.0.0.0/", "wildcard"),
        ("rediss://u:s3cret@host/#insecure", "TLS"),
        ("rediss://u:s3cret@host/#s3cret", "fragment"),
        ("redis+sentinel://u:s3cret@a,b", "service"),
        ("redis+sentinel://u:s3cret@a/main?x=s3cret", "service"),
        ("redis+sentinel://u:s3cret@a/main/two", "database"),
        ("redis+cluster://u:s3cret@a/3", "database"),
        ("redis+cluster://", "hostname"),
    ] {
        let error = Target::parse(url).map(|target| format!("{target:?}")).unwrap_err();
        let said = format!("{error} {error:?}");
        assert!(said.contains(word), "{url}: {said}");
        assert!(!said.contains("s3cret"), "{url}: {said}");
    }
}
