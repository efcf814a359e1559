//! Which GPU takes which one's place in a move: the driver wants a permutation of all of the host's GPUs.

use std::fmt::Display;

use sublet_core::inventory::LeftOut;
use sublet_core::text::safe;

/// The UUIDs of the GPUs that NVML counts, by its `answers` in its order. One that does not answer for its own, as one that is lost,
/// is among those that are `left_out`.
///
/// # Errors
/// One of them is not known.
pub(super) fn all_uuids<E: Display>(
    answers: Vec<Result<String, E>>,
    left_out: &[LeftOut],
) -> Result<Vec<String>, String> {
    let known = |index| {
        let gpus = left_out.iter().map(|gone| &gone.gpu);
        gpus.filter(|gpu| gpu.uuid.starts_with("GPU-")).find(|gpu| gpu.index == index)
    };
    let one = |(answer, index): (Result<String, E>, u32)| {
        answer.or_else(|error| {
            let unknown = || format!("nobody knows the UUID of GPU {index} ({})", safe(&error.to_string()));
            known(index).map(|gpu| gpu.uuid.clone()).ok_or_else(unknown)
        })
    };
    answers.into_iter().zip(0..).map(one).collect()
}

/// Each of `all`, followed by the one that takes its place: `here` and `there` change places. That is the permutation of the way
/// back, too.
pub(super) fn change_places(all: &[String], here: &str, there: &str) -> Vec<String> {
    let replaced = |uuid: &str| match uuid {
        uuid if uuid == here => there.to_owned(),
        uuid if uuid == there => here.to_owned(),
        uuid => uuid.to_owned(),
    };
    all.iter().flat_map(|uuid| [uuid.clone(), replaced(uuid)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::inventory::Device;
    use sublet_core::place::fixture::device;

    #[test]
    fn a_gpu_that_does_not_answer_stays_where_it_is_in_a_move_of_the_rest() {
        let gone = |gpu| LeftOut { gpu, mig: vec![], lost: true, why: "it fell off the bus".to_owned() };
        let answers = || vec![Ok("GPU-0".to_owned()), Err("GPU is lost"), Ok("GPU-2".to_owned())];
        let all = all_uuids(answers(), &[gone(device(1))]).unwrap();
        assert_eq!(
            change_places(&all, "GPU-0", "GPU-2"),
            ["GPU-0", "GPU-2", "GPU-1", "GPU-1", "GPU-2", "GPU-0"]
        );
        let anonymous = gone(Device { uuid: "0000:11:00.0".to_owned(), ..device(1) });
        for left_out in [vec![], vec![gone(device(2))], vec![anonymous]] {
            let why = all_uuids(answers(), &left_out).unwrap_err();
            assert_eq!(why, "nobody knows the UUID of GPU 1 (GPU is lost)");
        }
    }
}
