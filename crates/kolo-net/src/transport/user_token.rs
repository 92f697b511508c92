//! The secret of a user, which authenticates processes of one user to each other on loopback.
//!
//! Loopback is open to every user of a machine. So a server there that was given neither certificates nor a token
//! requires one that only processes of its own user can know: it is derived from a secret in a file that only that user
//! can read. There is one secret for each user, and so tasks that were started by hand find each other.
//!
//! What is sent is derived from the secret and the server's port. Whoever listens on a port where the user expected a
//! server of their own learns the token of that port, and not that of any other.

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use kolo_core::{Code, Error, Result};
use ring::rand::SecureRandom as _;
use ring::{hmac, rand};

use super::tls::Token;

/// Bytes of a secret.
const SECRET: usize = 32;

/// The user's secret.
pub(crate) struct UserToken {
    key: hmac::Key,
    path: PathBuf,
}

impl UserToken {
    /// The secret of this user, if there is one.
    pub fn find() -> Result<Option<UserToken>> {
        UserToken::find_in(&directories())
    }

    /// The secret of this user; made if there is none.
    pub fn find_or_create() -> Result<UserToken> {
        UserToken::find_or_create_in(&directories())
    }

    fn find_in(directories: &[PathBuf]) -> Result<Option<UserToken>> {
        for directory in directories {
            let path = directory.join(FILE);
            if path.symlink_metadata().is_err() {
                continue;
            }
            check_directory(directory)?;
            let text = read_private("the token file", &path)?;
            let secret = parse(&text).ok_or_else(|| {
                Error::failed_precondition(format!("the token file '{}' is damaged; remove it", path.display()))
            })?;
            return Ok(Some(UserToken { key: hmac::Key::new(hmac::HMAC_SHA256, &secret), path }));
        }
        Ok(None)
    }

    fn find_or_create_in(directories: &[PathBuf]) -> Result<UserToken> {
        if let Some(found) = UserToken::find_in(directories)? {
            return Ok(found);
        }
        let mut why = "HOME and XDG_RUNTIME_DIR are not set".to_owned();
        for directory in directories {
            match create(directory) {
                Ok(()) => break,
                Err(error) => why = format!("'{}': {error}", directory.display()),
            }
        }
        UserToken::find_in(directories)?.ok_or_else(|| {
            Error::failed_precondition(format!(
                "no file for the token of this user could be made ({why}); give a token in --token-file or KOLO_TOKEN"
            ))
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The token of this user's server on a port.
    pub fn token(&self, port: u16) -> Result<Token> {
        let tag = hmac::sign(&self.key, format!("kolo loopback {port}").as_bytes());
        Token::new(&hex(tag.as_ref()))
    }
}

const FILE: &str = "token";

/// Where the file may be, the best first. The home directory is the same however the user has logged in, unlike the
/// runtime directory.
fn directories() -> Vec<PathBuf> {
    let under = |variable: &str, name: &str| {
        let path = PathBuf::from(std::env::var_os(variable)?);
        path.is_absolute().then(|| path.join(name))
    };
    [under("HOME", ".kolo"), under("XDG_RUNTIME_DIR", "kolo")].into_iter().flatten().collect()
}

/// A new random token.
pub fn random_token() -> Result<Token> {
    Token::new(&hex(&random()?))
}

fn random() -> Result<[u8; SECRET]> {
    let mut bytes = [0; SECRET];
    let filled = rand::SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| Error::internal("the system has no random numbers"))?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse(text: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(text).ok()?.trim();
    let pair = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    if text.len() != 2 * SECRET {
        return None;
    }
    (0..text.len()).step_by(2).map(pair).collect()
}

/// Makes the file. It appears whole, and never in the place of another one: of two processes that make it at once, one
/// wins.
fn create(directory: &Path) -> std::io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let secret = random().map_err(|error| std::io::Error::other(error.to_string()))?;
    let temporary = directory.join(format!("{FILE}.{}", hex(&secret[..8])));
    let secret = random().map_err(|error| std::io::Error::other(error.to_string()))?;
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut file| writeln!(file, "{}", hex(&secret)));
    let linked = written.and_then(|()| std::fs::hard_link(&temporary, directory.join(FILE)));
    // What is left if this fails is a secret that nobody uses.
    let _ = std::fs::remove_file(&temporary);
    match linked {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// An error if somebody else could have put the file into the directory.
fn check_directory(directory: &Path) -> Result<()> {
    let about = directory.symlink_metadata().map_err(|error| {
        Error::failed_precondition(format!("the directory '{}' cannot be read: {error}", directory.display()))
    })?;
    match about.is_dir() && about.uid() == own_uid() && about.mode() & 0o022 == 0 {
        true => Ok(()),
        false => Err(Error::new(
            Code::PermissionDenied,
            format!(
                "others may have written to '{}', where the token of this user is kept: it must be a directory of this \
                 user that nobody else may write to (chmod 700)",
                directory.display()
            ),
        )),
    }
}

/// The contents of a file with a secret. Refuses one that others may read: the secret is theirs, too.
pub(crate) fn read_private(what: &str, path: &Path) -> Result<Vec<u8>> {
    use std::io::Read as _;
    let failed = |error: std::io::Error| {
        let code = match error.kind() {
            std::io::ErrorKind::NotFound => Code::NotFound,
            _ => Code::FailedPrecondition,
        };
        Error::new(code, format!("{what} '{}' cannot be read: {error}", path.display()))
    };
    let mut file = std::fs::File::open(path).map_err(failed)?;
    // Of the open file: its name may be another's by now.
    let about = file.metadata().map_err(failed)?;
    let is_regular = about.is_file();
    if is_regular && about.mode() & 0o077 != 0 {
        return Err(Error::new(
            Code::PermissionDenied,
            format!(
                "{what} '{}' can be read by others (mode {:o}); chmod 600 it",
                path.display(),
                about.mode() & 0o777
            ),
        ));
    }
    if is_regular && about.uid() != own_uid() && about.uid() != 0 {
        return Err(Error::new(
            Code::PermissionDenied,
            format!("{what} '{}' belongs to another user (uid {})", path.display(), about.uid()),
        ));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether the other end of a connection of this machine is a socket of this process's user. The kernel says so in its
/// table of sockets; false if it does not.
pub(crate) fn is_of_own_user(own: SocketAddr, peer: SocketAddr) -> bool {
    if !cfg!(target_os = "linux") || !own.ip().is_loopback() || !peer.ip().is_loopback() {
        return false;
    }
    let uid = own_uid().to_string();
    // A socket for both versions of IP is in the second table, with a mapped address.
    ["/proc/self/net/tcp", "/proc/self/net/tcp6"].into_iter().any(|table| {
        let is_v6 = table.ends_with('6');
        let (Some(local), Some(remote)) = (table_address(peer, is_v6), table_address(own, is_v6)) else { return false };
        let Ok(text) = std::fs::read_to_string(table) else { return false };
        text.lines().any(|line| {
            let mut fields = line.split_ascii_whitespace().skip(1);
            // Only an open connection: what is left of a closed one is listed as root's.
            fields.next() == Some(&local)
                && fields.next() == Some(&remote)
                && fields.next() == Some("01")
                && fields.nth(3) == Some(&uid)
        })
    })
}

/// An address as the kernel's table has it: 32-bit words in the machine's order, in hexadecimal.
fn table_address(address: SocketAddr, is_v6: bool) -> Option<String> {
    let port = address.port();
    let octets: Vec<u8> = match (address.ip(), is_v6) {
        (std::net::IpAddr::V4(ip), false) => ip.octets().to_vec(),
        (std::net::IpAddr::V4(ip), true) => ip.to_ipv6_mapped().octets().to_vec(),
        (std::net::IpAddr::V6(ip), true) => ip.octets().to_vec(),
        (std::net::IpAddr::V6(_), false) => return None,
    };
    let words = octets.chunks_exact(4).map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
    Some(words.map(|word| format!("{word:08X}")).collect::<String>() + &format!(":{port:04X}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Folder {
            let path = std::env::temp_dir().join(format!("kolo-user-token-{}", hex(&random().unwrap()[..8])));
            std::fs::create_dir(&path).unwrap();
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_user_has_one_secret_and_every_port_a_token_of_its_own() {
        let folder = Folder::new();
        let places = [folder.0.join("missing/home"), folder.0.join("runtime")];
        assert!(UserToken::find_in(&places).unwrap().is_none());
        let made: Vec<UserToken> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..4).map(|_| scope.spawn(|| UserToken::find_or_create_in(&places).unwrap())).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let text = |token: &UserToken, port| token.token(port).unwrap().secret();
        for token in &made {
            assert_eq!(token.path(), places[1].join(FILE));
            assert_eq!(text(token, 1), text(&made[0], 1));
        }
        assert_ne!(text(&made[0], 1), text(&made[0], 2));
        let about = made[0].path().metadata().unwrap();
        assert_eq!((about.mode() & 0o777, about.len()), (0o600, 65));
        assert_eq!(places[1].metadata().unwrap().mode() & 0o777, 0o700);
        assert_eq!(std::fs::read_dir(&places[1]).unwrap().count(), 1, "nothing temporary is left");
    }

    #[test]
    fn a_secret_that_others_may_read_or_replace_is_refused() {
        let folder = Folder::new();
        let places = [folder.0.join("home")];
        let path = UserToken::find_or_create_in(&places).unwrap().path().to_owned();
        let refused = |with: &str| {
            let error = UserToken::find_or_create_in(&places).err().unwrap();
            assert!(error.message().contains(with), "{error}");
        };
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        refused("can be read by others (mode 640)");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::set_permissions(&places[0], std::fs::Permissions::from_mode(0o777)).unwrap();
        refused("others may have written to");
        std::fs::set_permissions(&places[0], std::fs::Permissions::from_mode(0o700)).unwrap();
        std::fs::write(&path, "short").unwrap();
        refused("is damaged; remove it");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_kernel_says_whose_the_other_end_is() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = std::net::TcpListener::bind(host) else { continue };
            let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, peer) = listener.accept().unwrap();
            let own = server.local_addr().unwrap();
            assert!(is_of_own_user(own, peer), "{host}");
            let other = SocketAddr::new(peer.ip(), peer.port() ^ 1);
            assert!(!is_of_own_user(own, other));
            drop(client);
            assert!(!is_of_own_user(own, peer), "a closed end is nobody's");
        }
    }
}
