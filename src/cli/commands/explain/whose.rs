//! Whose containers `sublet explain` speaks of.

use std::path::Path;

use nix::unistd::{AccessFlags, access};

use crate::preview::Whose;
use sublet_core::admit::is_remote;
use sublet_core::config::Config;

/// Where dockerd of root listens.
pub const DOCKER_SOCKET: &str = "/var/run/docker.sock";

/// Those of root's engines, for root and for a user who may use Docker's socket: dockerd starts their containers as
/// root, and no `[[policy]]` limits these. Other users, and those who ask for it, mean their rootless containers.
pub fn whose(rootless: bool, config: &Config) -> Whose {
    decide(Whose::callers(config), rootless, Path::new(DOCKER_SOCKET))
}

fn decide(callers: Whose, rootless: bool, socket: &Path) -> Whose {
    let by_docker = || !rootless && access(socket, AccessFlags::W_OK).is_ok();
    if callers == Whose::User && by_docker() { Whose::Root } else { callers }
}

/// The word for JSON.
pub fn word(whose: Whose, config: &Config) -> &'static str {
    match whose {
        Whose::User => "rootless",
        Whose::Root if is_remote(config) => "docker",
        Whose::Root => "root",
    }
}

/// Said where root's containers are meant although the caller is not root.
pub fn remark(whose: Whose, config: &Config) -> Option<&'static str> {
    (word(whose, config) == "docker").then_some("Docker's containers (--rootless: your own)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_use_dockers_socket_means_dockers_containers() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, none) = (dir.path().join("docker.sock"), dir.path().join("none"));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(decide(Whose::User, false, &socket), Whose::Root);
        assert_eq!(decide(Whose::User, true, &socket), Whose::User);
        assert_eq!(decide(Whose::User, false, &none), Whose::User);
        assert_eq!(decide(Whose::Root, true, &none), Whose::Root);
    }
}
