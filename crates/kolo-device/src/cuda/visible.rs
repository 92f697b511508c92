//! `CUDA_VISIBLE_DEVICES`: which GPUs a process sees, and in which order.
//!
//! The driver applies the variable itself. This parses it a second time, as a pure function, so that listings can show
//! which entry selected which GPU, which was dropped and why, and so that the rules can be tested without a GPU.

/// What an entry list selects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// The physical numbers, in the order they become visible: visible number 0 first.
    pub gpus: Vec<usize>,
    /// Which entries were dropped and why.
    pub warnings: Vec<String>,
}

/// Applies `CUDA_VISIBLE_DEVICES` to GPUs that are given as `(uuid, PCI id)`. `None` means the variable is not set: all
/// GPUs. Entries are numbers, UUIDs or the beginnings of such, or PCI ids; the first that is invalid, or names a GPU a
/// second time, ends the list, as with CUDA. An empty list, or one that begins with an invalid entry, selects nothing.
pub fn select_visible(value: Option<&str>, gpus: &[(&str, &str)]) -> Selection {
    let Some(value) = value else {
        return Selection { gpus: (0..gpus.len()).collect(), warnings: Vec::new() };
    };
    let value = value.trim().trim_matches(['"', '\'']).trim();
    let mut selection = Selection::default();
    if value.is_empty() || value == "NoDevFiles" {
        if !gpus.is_empty() {
            selection.warnings.push("CUDA_VISIBLE_DEVICES is empty: no GPU is visible".to_owned());
        }
        return selection;
    }
    let entries: Vec<&str> = value.split(',').map(str::trim).collect();
    for (i, entry) in entries.iter().enumerate() {
        let problem = match find(entry, gpus) {
            Ok(gpu) if selection.gpus.contains(&gpu) => {
                // CUDA refuses the whole list when a GPU is named twice.
                selection.gpus.clear();
                format!("names GPU {gpu} twice, which hides all GPUs")
            }
            Ok(gpu) => {
                selection.gpus.push(gpu);
                continue;
            }
            Err(problem) => problem,
        };
        let rest = match entries.len() - i - 1 {
            0 => String::new(),
            n => format!(", and {n} more after it are ignored"),
        };
        selection.warnings.push(format!("CUDA_VISIBLE_DEVICES: entry '{entry}' {problem}{rest}"));
        break;
    }
    selection
}

fn find(entry: &str, gpus: &[(&str, &str)]) -> Result<usize, String> {
    let n = gpus.len();
    if entry.starts_with("GPU-") {
        let matching: Vec<usize> = (0..n).filter(|&i| starts_with(gpus[i].0, entry)).collect();
        return match matching.as_slice() {
            [gpu] => Ok(*gpu),
            [] => Err("is the UUID of no GPU here".to_owned()),
            _ => Err("fits several GPUs: more of the UUID is needed".to_owned()),
        };
    }
    if entry.starts_with("MIG-") {
        return Err("names a part of a GPU (MIG), which is not supported here".to_owned());
    }
    if entry.contains(':') {
        let wanted = plain_pci(entry);
        return (0..n).find(|&i| plain_pci(gpus[i].1) == wanted).ok_or_else(|| "is the PCI id of no GPU".to_owned());
    }
    match entry.parse::<i64>() {
        Ok(number) if number < 0 => Err("is negative, which ends the list".to_owned()),
        Ok(number) => match usize::try_from(number) {
            Ok(gpu) if gpu < n => Ok(gpu),
            _ => Err(match n {
                0 => "names a GPU, but there are none".to_owned(),
                1 => "is not a GPU here: there is only GPU 0".to_owned(),
                n => format!("is not a GPU here: they are numbered 0 to {}", n - 1),
            }),
        },
        Err(_) => Err("is neither a number nor a UUID nor a PCI id".to_owned()),
    }
}

fn starts_with(uuid: &str, prefix: &str) -> bool {
    uuid.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

/// A PCI id without leading zeros of the domain: `0000:41:00.0` and `00000000:41:00.0` are the same.
pub(super) fn plain_pci(id: &str) -> String {
    let id = id.trim().to_ascii_lowercase();
    match id.matches(':').count() {
        2 => {
            let domain = id.trim_start_matches('0');
            if domain.starts_with(':') { format!("0{domain}") } else { domain.to_owned() }
        }
        _ => format!("0:{id}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPUS: [(&str, &str); 4] = [
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "00000000:03:00.0"),
        ("GPU-8932f938-d72c-4106-c12f-20bd9faed9f6", "00000000:41:00.0"),
        ("GPU-11111111-0000-0000-0000-000000000000", "00000000:81:00.0"),
        ("GPU-22222222-0000-0000-0000-000000000000", "00000001:81:00.0"),
    ];

    #[track_caller]
    fn check(value: &str, gpus: &[usize], warning: Option<&str>) {
        let selection = select_visible(Some(value), &GPUS);
        assert_eq!(selection.gpus, gpus, "{value}");
        match warning {
            Some(text) => assert!(selection.warnings.iter().any(|w| w.contains(text)), "{:?}", selection.warnings),
            None => assert!(selection.warnings.is_empty(), "{:?}", selection.warnings),
        }
    }

    #[test]
    fn every_form_of_the_variable() {
        assert_eq!(select_visible(None, &GPUS).gpus, [0, 1, 2, 3]);
        check("0,1", &[0, 1], None);
        check("3,2", &[3, 2], None);
        check(" 1 , 0 ", &[1, 0], None);
        check("\"2\"", &[2], None);
        check("'1,2'", &[1, 2], None);
        check("", &[], Some("empty"));
        check("NoDevFiles", &[], Some("empty"));
        check("-1", &[], Some("negative"));
        check("1,-1,2", &[1], Some("1 more after it"));
        check("0,7,1", &[0], Some("numbered 0 to 3, and 1 more after it are ignored"));
        check("9", &[], Some("'9'"));
        check("1,1", &[], Some("twice"));
        check("0,x", &[0], Some("neither a number"));
        check("GPU-11111111-0000-0000-0000-000000000000,0", &[2, 0], None);
        check("GPU-2222", &[3], None);
        check("gpu-2222", &[], Some("neither a number"));
        check("GPU-8932f93", &[], Some("fits several GPUs"));
        check("GPU-dead", &[], Some("no GPU here"));
        check("MIG-GPU-8932f937/1/2", &[], Some("MIG"));
        check("0000:41:00.0,41:00.0", &[], Some("twice"));
        check("0000:41:00.0,0001:81:00.0", &[1, 3], None);
        check("99999999999999999999", &[], Some("neither a number"));
    }

    #[test]
    fn without_cards_nothing_is_selected() {
        assert_eq!(select_visible(None, &[]), Selection::default());
        assert!(select_visible(Some(""), &[]).warnings.is_empty());
        assert!(select_visible(Some("0"), &[]).warnings[0].contains("there are none"));
    }
}
