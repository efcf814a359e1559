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
    /// The driver and the GPU's firmware are updated.
    Update,
    /// Nothing at once.
    Watch,
    /// Nobody here knows.
    LookUp,
}

use Remedy::{LookUp, Program, Reboot, Repair, Reset, ResetLater, Update, Watch};

/// Errors of a program's own, as NVIDIA's device plugin for Kubernetes takes them: the GPU is well.
const PROGRAM_ERRORS: [u32; 6] = [13, 31, 43, 45, 68, 109];

/// The driver asks for another recovery than before; the message says which.
pub(crate) const RECOVERY_CHANGED: u32 = 154;

/// Whether Xid `number` is an error of the program that it names, which says nothing of the GPU.
pub(crate) fn is_program_error(number: u32) -> bool {
    PROGRAM_ERRORS.contains(&number)
}

/// What Xid `number` means, and what is to be done.
pub(crate) const fn describe(number: u32) -> (&'static str, Remedy) {
    match number {
        8 => ("the GPU stopped answering a program", Program),
        11 | 25 | 32 | 69 | 80 => ("a broken stream of commands", Program),
        13 => ("a program's kernel made an illegal access or instruction", Program),
        31 => ("a program accessed memory that is not mapped", Program),
        14 | 106 | 107 => ("a test message", Watch),
        37 | 38 | 44 | 66 | 67 | 141 | 152 | 153 => ("an error of the driver's", Watch),
        39..=41 | 70..=72 | 75..=77 | 85 | 126..=135 => ("an error of a copy engine", Program),
        43 | 45 => ("a program was stopped, or its GPU work after another error", Program),
        46 | 158 => ("the GPU stopped working", Reset),
        48 | 140 => ("an uncorrectable memory error", Reset),
        54 => ("its auxiliary power is not connected", Repair),
        60 | 82..=84 | 86 | 88 | 89 | 96..=105 | 139 => ("an error of a video or image engine", Program),
        63 | 156 => ("a faulty row of memory, or another part, is replaced at the next reset", ResetLater),
        64 => ("a faulty row of memory cannot be replaced", Repair),
        68 => ("an error of the video decoder", Program),
        74 | 136 | 144..=150 => ("an error of an NVLink", Repair),
        78 => ("a virtual GPU did not start", Update),
        79 => ("the GPU has fallen off the bus", Reboot),
        92 => ("very many corrected memory errors", Watch),
        93 => ("its own settings were written very often", Watch),
        94 => ("an uncorrectable memory error that hit one program only", ResetLater),
        95 => ("an uncorrectable memory error that may have hit every program", Reset),
        108 | 137 => ("an access by an NVLink that is not allowed", Watch),
        109 => ("a program did not give the GPU up in time", Program),
        110 => ("a security fault", Reboot),
        62 | 119 | 120 => ("a processor of the GPU's own, by which the driver controls it, failed", Reset),
        121 => ("corrected errors of the link to the CPU", ResetLater),
        143 => ("the GPU could not be initialized", Reset),
        151 => ("a key of confidential computing could not be changed", Reboot),
        155 => ("an error of an NVLink, which the driver defines", Reset),
        157 | 160 | 161 => ("a part that is taken out of use, or could not be", Watch),
        _ => ("an error that this version does not know", LookUp),
    }
}

/// Whether a recovery action (`nvmlDeviceGpuRecoveryAction_s`) is asked for because of a fault of the GPU's: 3 is about
/// peer-to-peer traffic, and ends with that.
pub(crate) const fn is_fault(action: u64) -> bool {
    !matches!(action, 0 | 3)
}

/// What the driver asks for by such an action, and what is to be done.
pub(crate) const fn describe_recovery(action: u64) -> (&'static str, Remedy) {
    match action {
        1 => ("the driver asks for a reset", Reset),
        2 | 7 => ("the driver asks for a reboot", Reboot),
        4 => ("the driver asks for a reset when its work has ended", ResetLater),
        _ => ("the driver asks for a recovery", LookUp),
    }
}

impl Remedy {
    /// What to do with GPU `index`.
    pub fn words(self, index: u32) -> String {
        let command = format!("`nvidia-smi --gpu-reset -i {index}`");
        let reset = format!("end what uses it, then {command}");
        match self {
            Program => {
                "start the program again; where it comes back with one GPU only, reset that".to_owned()
            }
            Reset => format!("{reset}; a reboot if that fails"),
            ResetLater => format!("its programs may go on; when they have ended, {command}"),
            Reboot => "reboot the host; a power cycle if that does not help".to_owned(),
            Repair => format!("{reset}; where it comes back, have its hardware looked at"),
            Update => "update the driver and the GPU's firmware".to_owned(),
            Watch => format!("nothing, the first time; where it comes back, {reset}"),
            LookUp => format!("look it up in docs.nvidia.com/deploy/xid-errors; else {reset}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_errors_ask_for_no_reset() {
        for number in [13, 31, 43, 45, 68, 109] {
            assert!(is_program_error(number) && describe(number).1 == Program, "{number}");
        }
        assert!([48, 63, 79, 154, 999].iter().all(|number| !is_program_error(*number)));
    }

    #[test]
    fn the_remedy_is_the_one_of_nvidias_catalogue() {
        for (remedy, numbers) in [
            (
                Program,
                "8 11 25 32 39 40 41 60 69 70 71 72 75 76 77 80 82 83 84 85 86 88 89 96 100 105 126 135 139",
            ),
            (Watch, "14 37 38 44 66 67 92 93 106 107 108 137 141 152 153 157 160 161"),
            (Reset, "46 48 62 95 119 120 140 143 155 158"),
            (ResetLater, "63 94 121 156"),
            (Reboot, "79 110 151"),
            (Repair, "54 64 74 136 144 150"),
            (Update, "78"),
            (LookUp, "1 42 87 90 125 138 142 159 4242"),
        ] {
            for number in numbers.split(' ') {
                assert_eq!(describe(number.parse().unwrap()).1, remedy, "Xid {number}");
            }
        }
    }

    #[test]
    fn one_that_nobody_knows_is_looked_up() {
        let (what, remedy) = describe(u32::MAX);
        assert_eq!(what, "an error that this version does not know");
        assert!(remedy.words(3).contains("docs.nvidia.com/deploy/xid-errors"));
        assert!(describe(79).1.words(3).starts_with("reboot"));
    }
}
