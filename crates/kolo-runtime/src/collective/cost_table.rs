//! The table of costs as text: what was measured on a machine, for the groups of later programs.

use std::time::Duration;

use kolo_core::{Error, Result};

use super::Costs;

/// Costs, and which of them were measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CostTable {
    costs: Costs,
    measured: Vec<&'static str>,
}

/// The first line of a file.
const HEAD: &str = "kolo collective costs 1";

/// A number of the table.
struct Entry {
    name: &'static str,
    what: &'static str,
    unit: &'static str,
    get: fn(&Costs) -> f64,
    set: fn(&mut Costs, f64),
    most: f64,
}

const MOST_MICROS: f64 = 1e7;
const MOST_RATE: f64 = 1e15;

macro_rules! time {
    ($field:ident, $name:literal, $what:literal) => {
        Entry {
            name: $name,
            what: $what,
            unit: "us",
            get: |costs| costs.$field.as_secs_f64() * 1e6,
            set: |costs, micros| costs.$field = Duration::from_secs_f64(micros / 1e6),
            most: MOST_MICROS,
        }
    };
}

macro_rules! rate {
    ($field:ident, $name:literal, $what:literal) => {
        Entry {
            name: $name,
            what: $what,
            unit: "bytes/s",
            get: |costs| costs.$field,
            set: |costs, rate| costs.$field = rate,
            most: MOST_RATE,
        }
    };
}

const ENTRIES: [Entry; 7] = [
    time!(base, "base_us", "a call, whatever it does"),
    time!(hop, "hop_us", "until a small message has arrived"),
    time!(message, "message_us", "each further message at the same time"),
    rate!(bytes_per_second, "bytes_per_second", "what a rank sends"),
    rate!(host_bytes_per_second, "host_bytes_per_second", "what a host sends to others"),
    time!(memory_base, "memory_base_us", "a call of ranks that share memory"),
    rate!(memory_bytes_per_second, "memory_bytes_per_second", "what ranks that share memory reduce"),
];

impl CostTable {
    /// The names under which [`CostTable::measure`] takes numbers, in their order.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ENTRIES.iter().map(|entry| entry.name)
    }

    /// What groups work with.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Takes a number that was measured. It is kept within what a file may say.
    pub fn measure(&mut self, name: &str, value: f64) -> Result<()> {
        let entry = find(name)?;
        (entry.set)(&mut self.costs, value.clamp(1e-3, entry.most));
        self.measured.retain(|known| *known != entry.name);
        self.measured.push(entry.name);
        Ok(())
    }

    /// Name, value with its unit, what it is, and whether it was measured.
    pub fn rows(&self) -> impl Iterator<Item = (&'static str, f64, &'static str, &'static str, bool)> {
        let row = |entry: &Entry| {
            let is_measured = self.measured.contains(&entry.name);
            (entry.name, (entry.get)(&self.costs), entry.unit, entry.what, is_measured)
        };
        ENTRIES.iter().map(row)
    }

    /// As a file has it: only what was measured.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{HEAD}\n# Written by `kolo bench collectives --calibrate`; `kolo explain collectives` shows it.\n"
        );
        for entry in ENTRIES.iter().filter(|entry| self.measured.contains(&entry.name)) {
            text += &format!("{} {}\n", entry.name, (entry.get)(&self.costs));
        }
        text
    }

    /// What a file says. Everything that it does not say has its default.
    pub fn parse(text: &str) -> Result<CostTable> {
        let mut lines = text.lines().enumerate();
        if lines.next().is_none_or(|(_, line)| line != HEAD) {
            return Err(Error::invalid_argument(format!("it does not begin with '{HEAD}'")));
        }
        let mut table = CostTable::default();
        for (i, line) in lines {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |why: String| Error::invalid_argument(format!("line {}, '{line}': {why}", i + 1));
            let (name, value) =
                line.split_once(' ').ok_or_else(|| wrong("it is not a name and a number".to_owned()))?;
            let entry = find(name).map_err(|error| wrong(error.message().to_owned()))?;
            let value: f64 = value.trim().parse().map_err(|_| wrong(format!("'{value}' is not a number")))?;
            if !(value > 0.0 && value <= entry.most) {
                return Err(wrong(format!("it is not above 0 and at most {:e} {}", entry.most, entry.unit)));
            }
            if table.measured.contains(&entry.name) {
                return Err(wrong(format!("{name} was there before")));
            }
            table.measure(name, value)?;
        }
        match table.measured.is_empty() {
            true => Err(Error::invalid_argument("nothing in it was measured")),
            false => Ok(table),
        }
    }
}

fn find(name: &str) -> Result<&'static Entry> {
    ENTRIES.iter().find(|entry| entry.name == name).ok_or_else(|| {
        let names: Vec<&str> = CostTable::names().collect();
        Error::invalid_argument(format!("there is no cost '{name}', but {}", names.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_read_as_it_is_written() {
        let mut table = CostTable::default();
        for (i, name) in CostTable::names().enumerate() {
            let text = table.text();
            assert_eq!(CostTable::parse(&text).ok(), (i > 0).then(|| table.clone()), "{text}");
            table.measure(name, 0.1 + i as f64 * 3.0).unwrap();
            assert_eq!(table.rows().filter(|row| row.4).count(), i + 1);
        }
        let Costs { base, hop, memory_bytes_per_second, .. } = *table.costs();
        assert_eq!((base, hop), (Duration::from_nanos(100), Duration::from_nanos(3100)));
        assert!((memory_bytes_per_second - 18.1).abs() < 1e-9);
        assert_eq!(CostTable::default().costs(), &Costs::default());
    }

    #[test]
    fn what_is_damaged_is_named() {
        let error = |text: &str| CostTable::parse(text).unwrap_err().to_string();
        let with = |line: &str| error(&format!("{HEAD}\nbase_us 1\n{line}\n"));
        assert!(error("").contains("does not begin with 'kolo collective costs 1'"));
        assert!(error("kolo collective costs 2\n").contains("does not begin with"));
        assert!(error(HEAD).contains("nothing in it was measured"));
        assert!(with("hop_us").contains("line 3, 'hop_us': it is not a name and a number"));
        assert!(with("hop_us 1e").contains("'1e' is not a number"));
        for value in ["0", "-1", "nan", "inf", "1e8"] {
            assert!(with(&format!("hop_us {value}")).contains("it is not above 0 and at most 1e7 us"), "{value}");
        }
        assert!(with("jump_us 1").contains("there is no cost 'jump_us', but base_us, hop_us"));
        assert!(with("base_us 2").contains("base_us was there before"));
    }
}
