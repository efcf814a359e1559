//! What a job got on one node, in the words of `scontrol --details show job`. Pure.
//!
//! The lines were taken from Slurm 22.05.8 and 24.11.5. Slurm tells the prolog which GPU a job got, but neither how many
//! shards of it nor whether the GPU is the job's own: `gpu:1` and `shard:2` look the same there.

/// What a job got of the GPUs of a node. GPUs are counted as Slurm counts them: in the order of gres.conf, from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// None of them.
    Nothing,
    /// Whole GPUs.
    Gpus(Vec<u32>),
    /// A part of one GPU, in percent.
    Mps { gpu: u32, percent: u32 },
    /// Shards of one GPU, and of how many, if Slurm says so (24.11 does).
    Shards { gpu: u32, shards: u32, of: Option<u32> },
}

/// What the job in `shown`, the output of `scontrol --details show job`, got on the node that is one of `hosts` in each
/// of its groups of nodes. `is_here` says whether a host list, such as `n[1-2]`, names this node.
///
/// # Errors
/// It is not such an output, or what the job got cannot be a share.
pub fn allocation(shown: &str, is_here: impl Fn(&str) -> bool) -> Result<Allocation, String> {
    let mut words = shown.split_whitespace();
    while let Some(word) = words.next() {
        let Some(hosts) = word.strip_prefix("Nodes=").filter(|hosts| is_here(hosts)) else { continue };
        // `Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)`
        let gres = words.by_ref().take(3).find_map(|word| word.strip_prefix("GRES="));
        return of_gres(gres.ok_or_else(|| format!("Slurm does not say what the job got on {hosts}"))?);
    }
    Err("Slurm does not name this node among the job's".to_owned())
}

/// `gpu:h200:2(IDX:0-1)`, `shard:7(7/8,0/8)`, `mps:30(IDX:0)`; several are joined by commas outside the parentheses.
fn of_gres(text: &str) -> Result<Allocation, String> {
    let mut depth = 0_i32;
    let entries = text.split(move |letter| {
        depth += i32::from(letter == '(') - i32::from(letter == ')');
        letter == ',' && depth == 0
    });
    let mut found = Allocation::Nothing;
    for entry in entries.filter(|entry| !entry.is_empty()) {
        let next = of_entry(entry)?;
        match (&found, &next) {
            (_, Allocation::Nothing) => {}
            (Allocation::Nothing, _) => found = next,
            _ => return Err(format!("the job got {text}, which is more than one kind of share")),
        }
    }
    Ok(found)
}

fn of_entry(entry: &str) -> Result<Allocation, String> {
    let strange = || format!("the job got {entry}, which this sublet cannot read");
    let (name, place) = entry.split_once('(').ok_or_else(strange)?;
    let place = place.strip_suffix(')').ok_or_else(strange)?;
    let kind = name.split(':').next().unwrap_or_default();
    if !matches!(kind, "gpu" | "mps" | "shard") {
        return Ok(Allocation::Nothing);
    }
    let all: u32 = name.rsplit(':').next().and_then(|count| count.parse().ok()).ok_or_else(strange)?;
    let shares = shares(place, all).ok_or_else(strange)?;
    if kind == "gpu" {
        return Ok(Allocation::Gpus(shares.into_iter().map(|share| share.gpu).collect()));
    }
    let [Share { gpu, part, of }] = shares[..] else {
        return Err(format!(
            "the job got {entry}: a share of sublet's is of one GPU; ask for less, or for whole GPUs"
        ));
    };
    match (kind, of) {
        ("mps", None | Some(100)) if (1..=100).contains(&part) => Ok(Allocation::Mps { gpu, percent: part }),
        ("mps", _) => Err(format!("the job got {entry}: gres.conf must have 100 of mps for each GPU")),
        _ => Ok(Allocation::Shards { gpu, shards: part, of }),
    }
}

struct Share {
    gpu: u32,
    part: u32,
    of: Option<u32>,
}

/// `IDX:0-1,3`, or `7/8,0/8` with a part for each GPU. `all` is the sum. Without parts it is that of a single GPU.
fn shares(place: &str, all: u32) -> Option<Vec<Share>> {
    if let Some(list) = place.strip_prefix("IDX:") {
        let gpus = gpus_of(list)?;
        return Some(gpus.into_iter().map(|gpu| Share { gpu, part: all, of: None }).collect());
    }
    let parts = (0..).zip(place.split(',')).map(|(gpu, part)| {
        let (part, of) = part.split_once('/')?;
        Some(Share { gpu, part: part.parse().ok()?, of: Some(of.parse().ok()?) })
    });
    let mut parts: Vec<Share> = parts.collect::<Option<_>>()?;
    parts.retain(|share| share.part > 0);
    (parts.iter().map(|share| share.part).sum::<u32>() == all).then_some(parts)
}

/// `0-1,3`
fn gpus_of(text: &str) -> Option<Vec<u32>> {
    let mut all = Vec::new();
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        // No host has more, and a range of billions would take all memory.
        if last > 1024 {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn got(gres: &str) -> Result<Allocation, String> {
        of_gres(gres)
    }

    #[test]
    fn what_slurm_2205_and_2411_say() {
        assert_eq!(got("gpu:2(IDX:0-1)"), Ok(Allocation::Gpus(vec![0, 1])));
        assert_eq!(got("gpu:h200:3(IDX:0,2-3)"), Ok(Allocation::Gpus(vec![0, 2, 3])));
        assert_eq!(got("mps:25(IDX:0)"), Ok(Allocation::Mps { gpu: 0, percent: 25 }));
        assert_eq!(got("mps:30(0/100,30/100)"), Ok(Allocation::Mps { gpu: 1, percent: 30 }));
        assert_eq!(got("shard:2(IDX:3)"), Ok(Allocation::Shards { gpu: 3, shards: 2, of: None }));
        let shards = Allocation::Shards { gpu: 1, shards: 2, of: Some(8) };
        assert_eq!(got("shard:2(0/8,2/8,0/8,0/8)"), Ok(shards.clone()));
        assert_eq!(got("nic:1(IDX:0),shard:h200:2(0/8,2/8)"), Ok(shards));
        assert_eq!(got(""), Ok(Allocation::Nothing));
    }

    #[test]
    fn what_is_no_share_is_refused_and_never_guessed() {
        for (gres, why) in [
            ("mps(CNT:25)", "cannot read"),
            ("mps:150(IDX:0)", "100 of mps"),
            ("mps:30(30/400,0/400)", "100 of mps"),
            ("shard:9(8/8,1/8)", "of one GPU"),
            ("shard:9(IDX:0-1)", "of one GPU"),
            ("shard:9(8/8,2/8)", "cannot read"),
            ("gpu:1(IDX:0),shard:2(IDX:1)", "more than one kind"),
            ("gpu:1(IDX:0-4000000000)", "cannot read"),
            ("gpu:1(IDX:)", "cannot read"),
            ("gpu:1", "cannot read"),
            ("shard:1(IDX:0", "cannot read"),
        ] {
            let said = got(gres).expect_err(gres);
            assert!(said.contains(why), "{gres}: {said}");
        }
    }

    #[test]
    fn the_group_of_this_node_counts() {
        let shown = "JobId=6 UserId=tester(1000) NumNodes=2 AllocTRES=cpu=2,node=2 JOB_GRES=gpu:3\n  \
                     Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)\n  Nodes=n[2-3] CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)\n";
        assert_eq!(allocation(shown, |hosts| hosts == "n1"), Ok(Allocation::Gpus(vec![0, 1])));
        assert_eq!(allocation(shown, |hosts| hosts == "n[2-3]"), Ok(Allocation::Gpus(vec![0])));
        assert!(allocation(shown, |_| false).is_err());
        assert_eq!(
            allocation("Nodes=n1 CPU_IDs=0 Mem=0 GRES= TresPerNode=x", |_| true),
            Ok(Allocation::Nothing)
        );
        assert!(allocation("Nodes=n1 CPU_IDs=0", |_| true).is_err());
    }
}
