//! A server that only speaks TLS.

use std::ops::{Deref, DerefMut};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use super::Build;
use super::server::{Launch, Server};

/// A Redis behind TLS, whose certificate (for `127.0.0.1` and `localhost`) is of an authority of its own.
#[derive(Debug)]
pub struct Tls {
    server: Server,
    root_pem: String,
}

impl Tls {
    pub async fn start() -> Self {
        let root_key = KeyPair::generate().expect("a key");
        let mut root = CertificateParams::default();
        // Another name than the server's certificate has: else that one looks self-signed.
        root.distinguished_name.push(DnType::CommonName, "authority of the tests");
        root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root_pem = root.self_signed(&root_key).expect("the authority's certificate").pem();

        let key = KeyPair::generate().expect("a key");
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let certificate = CertificateParams::new(names)
            .and_then(|params| params.signed_by(&key, &Issuer::new(root, root_key)))
            .expect("the server's certificate");

        let launch = Launch::new(Build::Redis)
            .tls()
            .file(Launch::ROOT, root_pem.clone())
            .file("server.pem", certificate.pem())
            .file("server.key", key.serialize_pem())
            .args(&["--tls-ca-cert-file", Launch::ROOT, "--tls-auth-clients", "no"])
            .args(&["--tls-cert-file", "server.pem", "--tls-key-file", "server.key"]);
        Self { server: Server::start(launch).await, root_pem }
    }

    /// The certificate of the authority.
    pub fn root_pem(&self) -> &str {
        &self.root_pem
    }
}

impl Deref for Tls {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

impl DerefMut for Tls {
    fn deref_mut(&mut self) -> &mut Server {
        &mut self.server
    }
}
