//! The file of a user in which `kolo bench collectives --calibrate` keeps what messages cost on a machine.

use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use kolo_core::{Error, Result};
use kolo_runtime::collective::{CostTable, Costs};

/// A longer file is none of ours.
const MOST_BYTES: u64 = 64 << 10;

/// Where it is: in the folder of Kolo in the user's home directory. `None` for a user without one.
pub(crate) fn cost_file(variable: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let home = PathBuf::from(variable("HOME")?);
    home.is_absolute().then(|| home.join(".kolo").join("collective-costs"))
}

/// What the file says; `None` if there is none. An error that says what to do if it is damaged.
pub(crate) fn read_costs(path: &Path) -> Result<Option<CostTable>> {
    let name = path.display();
    let wrong = |why: &str| {
        Error::invalid_argument(format!(
            "the measured costs of collectives in '{name}' cannot be used: {why}; measure again with `kolo bench collectives \
             --calibrate`, or remove the file"
        ))
    };
    let text = match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Ok(data) if data.len() > MOST_BYTES => return Err(wrong("it is too long")),
        _ => std::fs::read_to_string(path).map_err(|error| wrong(&error.to_string()))?,
    };
    CostTable::parse(&text).map(Some).map_err(|error| wrong(error.message()))
}

/// Replaces the file in one step.
pub(crate) fn write_costs(path: &Path, table: &CostTable) -> Result<()> {
    let wrong = |error: std::io::Error| Error::failed_precondition(format!("'{}': {error}", path.display()));
    let folder = path.parent().unwrap_or(Path::new("/"));
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(wrong(error)),
        _ => {}
    }
    let temporary = path.with_extension(std::process::id().to_string());
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary);
    let written = file
        .and_then(|mut file| file.write_all(table.text().as_bytes()))
        .and_then(|()| std::fs::rename(&temporary, path));
    written.map_err(|error| {
        let _ = std::fs::remove_file(&temporary);
        wrong(error)
    })
}

/// The costs that a rank begins with: the measured ones, or else the defaults. All ranks take those of rank 0.
pub(super) fn own_costs(variable: &dyn Fn(&str) -> Option<String>) -> Costs {
    let Some(path) = cost_file(variable) else { return Costs::default() };
    match read_costs(&path) {
        Ok(table) => *table.unwrap_or_default().costs(),
        Err(error) => {
            tracing::warn!(target: "kolo::collective", "{}; until then, the defaults are taken", error.message());
            Costs::default()
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_net::tls::{Security, Token};

    use super::*;
    use crate::parallel::World;
    use crate::place::Environment;

    #[test]
    fn costs_are_kept_and_a_damaged_file_is_refused_by_name_and_left_alone() {
        let home = std::env::temp_dir().join(format!("kolo-costs-{}", std::process::id()));
        std::fs::create_dir_all(&home).unwrap();
        let variable = |name: &str| (name == "HOME").then(|| home.to_string_lossy().into_owned());
        let path = cost_file(&variable).unwrap();
        assert_eq!(read_costs(&path).unwrap(), None);
        assert_eq!(own_costs(&variable), Costs::default());
        let mut table = CostTable::default();
        table.measure("hop_us", 7.5).unwrap();
        write_costs(&path, &table).unwrap();
        write_costs(&path, &table).unwrap();
        assert_eq!(read_costs(&path).unwrap(), Some(table.clone()));
        assert_eq!(own_costs(&variable), *table.costs());
        std::fs::write(&path, "kolo collective costs 1\nhop_us many\n").unwrap();
        let error = read_costs(&path).unwrap_err().to_string();
        for word in [path.to_str().unwrap(), "line 2, 'hop_us many'", "--calibrate", "or remove the file"] {
            assert!(error.contains(word), "{error}");
        }
        assert_eq!(own_costs(&variable), Costs::default());
        std::fs::write(&path, vec![b'#'; 1 << 20]).unwrap();
        assert!(read_costs(&path).unwrap_err().to_string().contains("too long"));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
        std::fs::remove_dir_all(&home).unwrap();
        assert_eq!(cost_file(&|_| None), None);
        assert_eq!(cost_file(&|_| Some("relative".to_owned())), None);
    }

    #[test]
    fn ranks_over_tcp_choose_by_the_file_of_the_first_one() {
        let home = std::env::temp_dir().join(format!("kolo-rank-costs-{}", std::process::id()));
        std::fs::create_dir_all(&home).unwrap();
        let home_of = |name: &str| (name == "HOME").then(|| home.to_string_lossy().into_owned());
        let mut table = CostTable::default();
        table.measure("hop_us", 321.0).unwrap();
        write_costs(&cost_file(&home_of).unwrap(), &table).unwrap();
        // A port that was free a moment ago.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let rank = |rank: usize| {
            let home = home_of("HOME").filter(|_| rank == 0).unwrap_or_default();
            let (rank, port) = (rank.to_string(), port.to_string());
            let variables = [
                ("HOME", home.as_str()),
                ("RANK", &rank),
                ("LOCAL_RANK", &rank),
                ("WORLD_SIZE", "2"),
                ("LOCAL_WORLD_SIZE", "2"),
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", &port),
            ];
            let token = Some(Token::new("a-token-for-tests").unwrap());
            let security = Security { token, ..Security::default() };
            let world = World::from_environment(&Environment::new(variables), &security).unwrap();
            let part = world.split(0).unwrap();
            [world.group().options().costs, part.group().options().costs]
        };
        let found = std::thread::scope(|scope| {
            let rank = &rank;
            let ranks = [0, 1].map(|i| scope.spawn(move || rank(i)));
            ranks.map(|rank| rank.join().unwrap())
        });
        assert_eq!(found, [[*table.costs(); 2]; 2]);
        std::fs::remove_dir_all(&home).unwrap();
    }
}
