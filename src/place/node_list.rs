//! Slurm's lists of hosts, `n[01-03,7],login,rack[1-2]node[0-3]`, and of counts, `4(x2),3`.

use kolo_core::{Error, Result};

/// The most hosts of a list. Slurm has none longer.
const MOST: usize = 1 << 16;

/// The hosts of a list, in its order.
pub(super) fn hosts(name: &str, text: &str) -> Result<Vec<String>> {
    let wrong = |why: &str| {
        Error::invalid_argument(format!("{name}='{text}' is not a list of hosts such as n[1-3,5],m7: {why}"))
    };
    let mut all = Vec::new();
    for item in items(text).ok_or_else(|| wrong("a bracket is not closed, or not opened"))? {
        if item.is_empty() {
            return Err(wrong("a host is missing before or after a comma"));
        }
        let mut some = vec![String::new()];
        let mut rest = item;
        while let Some((plain, more)) = rest.split_once('[') {
            let (ranges, after) = more.split_once(']').ok_or_else(|| wrong("a bracket is not closed"))?;
            let numbers = numbers(ranges).map_err(|why| wrong(&why))?;
            if some.len().saturating_mul(numbers.len()) > MOST {
                return Err(wrong("there are too many"));
            }
            let joined =
                |host: &String| numbers.iter().map(|number| format!("{host}{plain}{number}")).collect::<Vec<_>>();
            some = some.iter().flat_map(joined).collect();
            rest = after;
        }
        some.iter_mut().for_each(|host| host.push_str(rest));
        all.extend(some);
        if all.len() > MOST {
            return Err(wrong("there are too many"));
        }
    }
    Ok(all)
}

/// Counts by host, which Slurm shortens: `4(x2),3` is 4, 4, 3.
pub(super) fn counts(name: &str, text: &str) -> Result<Vec<usize>> {
    let wrong = || Error::invalid_argument(format!("{name}='{text}' is not a list of counts such as 4(x2),3"));
    let number = |text: &str| super::environment::parse(name, text).map_err(|_| wrong());
    let mut all = Vec::new();
    for item in text.split(',') {
        let (count, times) = match item.split_once("(x") {
            Some((count, times)) => (number(count)?, number(times.strip_suffix(')').ok_or_else(wrong)?)?),
            None => (number(item)?, 1),
        };
        if times > MOST - all.len() {
            return Err(wrong());
        }
        all.extend(std::iter::repeat_n(count, times));
    }
    Ok(all)
}

/// What stands between the commas outside of brackets. `None` if brackets are not in pairs.
fn items(text: &str) -> Option<Vec<&str>> {
    let (mut items, mut start, mut is_inside) = (Vec::new(), 0, false);
    for (i, byte) in text.bytes().enumerate() {
        match byte {
            b'[' if !is_inside => is_inside = true,
            b']' if is_inside => is_inside = false,
            b'[' | b']' => return None,
            b',' if !is_inside => {
                items.push(&text[start..i]);
                start = i + 1;
            }
            _ => {}
        }
    }
    items.push(&text[start..]);
    (!is_inside).then_some(items)
}

/// `01-03,7` is 01, 02, 03, 7.
fn numbers(ranges: &str) -> std::result::Result<Vec<String>, String> {
    let number = |text: &str| {
        let is_number = !text.is_empty() && text.len() <= 18 && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<usize>().ok().filter(|_| is_number).ok_or_else(|| format!("'{text}' is not a number"))
    };
    let mut all = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (from, to) = (number(first)?, number(last)?);
        if from > to {
            return Err(format!("{range} runs backwards"));
        }
        if to - from >= MOST - all.len() {
            return Err("there are too many".to_owned());
        }
        let width = first.len();
        all.extend((from..=to).map(|number| format!("{number:0width$}")));
    }
    Ok(all)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_hosts_are_written_out() {
        for (text, expected) in [
            ("n1", "n1"),
            ("n[1-3]", "n1 n2 n3"),
            ("n[1-3,5],m7", "n1 n2 n3 n5 m7"),
            ("n[08-11]", "n08 n09 n10 n11"),
            ("n[8-11]-ib", "n8-ib n9-ib n10-ib n11-ib"),
            ("r[0-1]n[1,03]", "r0n1 r0n03 r1n1 r1n03"),
            ("a,b[2],c.example", "a b2 c.example"),
        ] {
            assert_eq!(hosts("L", text).unwrap().join(" "), expected, "{text}");
        }
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for (text, why) in [
            ("n[1-3", "a bracket is not closed"),
            ("n1]", "not opened"),
            ("n[[1]]", "a bracket"),
            ("a,,b", "a host is missing"),
            ("", "a host is missing"),
            ("n[]", "'' is not a number"),
            ("n[1-x]", "'x' is not a number"),
            ("n[3-1]", "3-1 runs backwards"),
            ("n[0-99999999]", "too many"),
            ("n[0-999]m[0-999]", "too many"),
            ("n[99999999999999999999]", "is not a number"),
        ] {
            let error = hosts("SLURM_STEP_NODELIST", text).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("SLURM_STEP_NODELIST="), "{text}: {error}");
        }
    }

    #[test]
    fn counts_are_written_out() {
        assert_eq!(counts("C", "4(x2),3").unwrap(), [4, 4, 3]);
        assert_eq!(counts("C", "2").unwrap(), [2]);
        for text in ["", "4(x2", "4(2)", "x", "1,,2", "1(x99999999999)", "-1"] {
            assert!(counts("C", text).unwrap_err().to_string().contains("list of counts"), "{text}");
        }
    }
}
