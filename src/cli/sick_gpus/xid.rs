//! Xids: the numbers by which the driver reports an error of a GPU, as NVIDIA's catalogue describes those of Ampere and later
//! (docs.nvidia.com/deploy/xid-errors).

/// What is to be done after one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// The program is started again.
    Program,
    /// The GPU is reset.
    Reset,
    /// The GPU is reset when its programs can be ended; they may go on until then.
    ResetLater,
    /// The host is booted.
    Reboot,
    /// The GPU is reset, and looked at by somebody who repairs such.
    Repair,
    /// Nothing at once.
    Watch,
    /// Nobody here knows.
    LookUp,
}

use Remedy::{Program, Reboot, Repair, Reset, ResetLater, Watch};

/// Errors of a program's own, as NVIDIA's device plugin for Kubernetes takes them: the GPU is well.
const OF_PROGRAMS: [u32; 6] = [13, 31, 43, 45, 68, 109];

/// The driver asks for another recovery than before; the message says which.
pub(crate) const RECOVERY_CHANGED: u32 = 154;

/// What each means, and what is to be done.
const CATALOGUE: [(u32, &str, Remedy); 42] = [
    (8, "the GPU stopped answering a program", Program),
    (11, "a broken stream of commands", Program),
    (13, "a program's kernel made an illegal access or instruction", Program),
    (25, "a broken stream of commands", Program),
    (31, "a program accessed memory that is not mapped", Program),
    (32, "a broken stream of commands", Program),
    (37, "an error of the driver's firmware", Watch),
    (38, "an error of the driver's firmware", Watch),
    (43, "the GPU stopped a program after an error of the program's own", Program),
    (44, "a fault while the GPU changed between programs", Watch),
    (45, "a program's work was ended with it", Program),
    (46, "the GPU stopped working", Reset),
    (48, "an uncorrectable memory error", Reset),
    (54, "the board's own power cable is not connected", Repair),
    (62, "the GPU's microcontroller halted", Reset),
    (63, "a faulty row of memory is replaced at the next reset", ResetLater),
    (64, "a faulty row of memory cannot be replaced", Repair),
    (68, "an error of the video decoder", Program),
    (69, "an error of the graphics engine's class", Program),
    (74, "an error of an NVLink", Repair),
    (79, "the GPU has fallen off the bus", Reboot),
    (92, "very many corrected memory errors", Watch),
    (94, "an uncorrectable memory error that hit one program only", ResetLater),
    (95, "an uncorrectable memory error that may have hit every program", Reset),
    (109, "a program did not give the GPU up in time", Program),
    (110, "a security fault", Reboot),
    (119, "the GPU's system processor does not answer", Reset),
    (120, "the GPU's system processor failed", Reset),
    (121, "corrected errors of the link to the CPU", ResetLater),
    (136, "an NVLink failed in its training", Reset),
    (140, "an uncorrectable memory error that was not recovered from", Reset),
    (143, "the GPU could not be initialized", Reset),
    (144, "an error of an NVLink", Repair),
    (145, "an error of an NVLink", Repair),
    (146, "an error of an NVLink", Repair),
    (147, "an error of an NVLink", Repair),
    (148, "an error of an NVLink", Repair),
    (149, "an error of an NVLink", Repair),
    (150, "an error of an NVLink", Repair),
    (154, "the driver asks for a recovery", Reset),
    (156, "a faulty part of the GPU is put out of use", Reset),
    (158, "the GPU did not answer in time", Reset),
];

/// Whether Xid `number` is an error of the program that it names, which says nothing of the GPU.
pub(crate) fn is_of_program(number: u32) -> bool {
    OF_PROGRAMS.contains(&number)
}

/// What Xid `number` means, and what is to be done.
pub(crate) fn describe(number: u32) -> (&'static str, Remedy) {
    let known = CATALOGUE.iter().find(|(known, ..)| *known == number);
    known.map_or(("an error that this version does not know", Remedy::LookUp), |(_, what, remedy)| {
        (what, *remedy)
    })
}

impl Remedy {
    /// What to do with GPU `index`.
    pub fn words(self, index: u32) -> String {
        let reset = format!("end what uses it, then `nvidia-smi --gpu-reset -i {index}`");
        match self {
            Program => {
                "start the program again; where it comes back with one GPU only, reset that".to_owned()
            }
            Reset => format!("{reset}; a reboot if that fails"),
            ResetLater => {
                format!("its programs may go on; when they have ended, `nvidia-smi --gpu-reset -i {index}`")
            }
            Reboot => "reboot the host; a power cycle if that does not help".to_owned(),
            Repair => format!("{reset}; where it comes back, have its hardware looked at"),
            Watch => format!("nothing, the first time; where it comes back, {reset}"),
            Self::LookUp => {
                format!("look it up in NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors); else {reset}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_xid_is_described_once_and_those_of_programs_ask_for_no_reset() {
        assert!(CATALOGUE.is_sorted_by(|(one, ..), (other, ..)| one < other));
        for number in OF_PROGRAMS {
            assert_eq!(describe(number).1, Program, "{number}");
        }
        assert!([48, 63, 79, 154, 999].iter().all(|number| !is_of_program(*number)));
    }

    #[test]
    fn one_that_nobody_knows_is_looked_up() {
        let (what, remedy) = describe(u32::MAX);
        assert_eq!(what, "an error that this version does not know");
        assert!(remedy.words(3).contains("docs.nvidia.com/deploy/xid-errors"));
        assert!(describe(79).1.words(3).starts_with("reboot"));
    }
}
