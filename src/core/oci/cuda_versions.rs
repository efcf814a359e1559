//! Which CUDA an image needs, and which libcuda its programs will load. Known by its environment, by names, and by where
//! links lead; no file of the image is parsed.

use std::path::Path;

use serde_json::Value;

use super::environment::environment_value;
use super::rootfs::Tree;
use crate::inventory::Driver;
use crate::text::safe;

/// Searched for names, never parsed. ld.so.conf, which contains directives, is not read at all.
const CACHE: &str = "/etc/ld.so.cache";
/// How much of an image's ld.so.cache is read at most, in bytes. That of a full desktop has a few hundred KiB.
const LONGEST_CACHE: u64 = 4 << 20;
/// How many directories of one `LD_LIBRARY_PATH` are searched at most.
const MOST_DIRECTORIES: usize = 64;
/// Where NVIDIA's packages put a newer libcuda for older drivers (CUDA Compatibility, "Forward Compatibility").
const COMPAT: &str = "/usr/local/cuda/compat";

/// A libcuda of the image's that its loader will prefer to the mounted one.
struct Rival {
    path: String,
    /// As `libcuda.so.575.57.08`, where links lead.
    file: String,
    found_by: &'static str,
}

/// One line for each libcuda that takes precedence over the mounted one, and if the driver is older than the image needs.
/// Nothing is changed, because forward compatibility packages work this way.
pub(super) fn warnings(tree: &Tree, spec: &Value, ours: Option<&Path>, driver: &Driver) -> Vec<String> {
    let rivals = rivals(tree, spec, ours);
    let Some(needed) = required_version(spec).filter(|needed| *needed > driver.cuda) else {
        return rivals.iter().map(|rival| describe_rival(rival, driver)).collect();
    };
    let (major, minor) = driver.cuda;
    let help = match rivals.first() {
        Some(Rival { path, file, found_by }) => format!(
            "it uses its own {} ({}, found by its {found_by}), which works on data-centre GPUs only",
            safe(path),
            safe(file)
        ),
        None if tree.find(Path::new(&format!("{COMPAT}/libcuda.so.1"))).is_ok() => format!(
            "use an image for CUDA {major}.{minor} or a newer driver; on data-centre GPUs the image can use its own \
             newer libcuda with `-e LD_LIBRARY_PATH={COMPAT}`"
        ),
        None => format!("use an image for CUDA {major}.{minor} or a newer driver"),
    };
    vec![format!(
        "the image needs CUDA {}.{} (its NVIDIA_REQUIRE_CUDA), and the host's driver {} has CUDA {major}.{minor}: {help}",
        needed.0, needed.1, driver.version
    )]
}

fn describe_rival(Rival { path, file, found_by }: &Rival, driver: &Driver) -> String {
    format!(
        "the image's own {} ({}, found by its {found_by}) is used instead of the libcuda of the host's driver {}: if \
         CUDA fails, remove it from LD_LIBRARY_PATH or from the image",
        safe(path),
        safe(file),
        driver.version
    )
}

/// The CUDA version that `NVIDIA_REQUIRE_CUDA` asks for: as `cuda>=12.4 brand=tesla,driver>=470`, where a space means or,
/// and a comma and (Container Toolkit, "Driver Capabilities and Constraints").
fn required_version(spec: &Value) -> Option<(u32, u32)> {
    let required = environment_value(spec, "NVIDIA_REQUIRE_CUDA")?;
    let version = |term: &str| {
        let version = term.strip_prefix("cuda>=")?;
        let (major, minor) = version.split_once('.').unwrap_or((version, "0"));
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let alternatives = required.split_whitespace().take(MOST_DIRECTORIES);
    alternatives.filter_map(|terms| terms.split(',').filter_map(version).max()).min()
}

/// Libraries of the image that its loader will prefer to the mounted ones.
fn rivals(tree: &Tree, spec: &Value, ours: Option<&Path>) -> Vec<Rival> {
    let path = environment_value(spec, "LD_LIBRARY_PATH").unwrap_or_default();
    // ld.so(8): separated by colons or semicolons.
    let by_path = path.split([':', ';']).filter(|dir| dir.starts_with('/')).take(MOST_DIRECTORIES);
    let by_path =
        by_path.map(|dir| (format!("{}/libcuda.so.1", dir.trim_end_matches('/')), "LD_LIBRARY_PATH"));
    let cache = tree.find(Path::new(CACHE)).and_then(|found| found.read(LONGEST_CACHE));
    let by_cache = parse_cache(&cache.unwrap_or_default()).into_iter().map(|path| (path, "/etc/ld.so.cache"));
    let mut seen = Vec::new();
    let mut rivals = Vec::new();
    for (path, found_by) in by_path.chain(by_cache) {
        let Ok(found) = tree.find(Path::new(&path)) else { continue };
        let elsewhere = Path::new(&path).parent().and_then(|dir| tree.find(dir).ok());
        if elsewhere.is_none_or(|dir| Some(dir.path.as_path()) == ours) || seen.contains(&found.path) {
            continue;
        }
        let file = found.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        rivals.push(Rival { path, file, found_by });
        seen.push(found.path.clone());
    }
    rivals
}

/// Paths of a libcuda among the strings of an ld.so.cache (dl-cache.h), found without parsing it.
fn parse_cache(cache: &[u8]) -> Vec<String> {
    let strings = cache.split(|&byte| byte == 0).filter(|text| text.ends_with(b"/libcuda.so.1"));
    let paths =
        strings.filter_map(|text| std::str::from_utf8(text).ok().filter(|text| text.starts_with('/')));
    paths.take(MOST_DIRECTORIES).map(str::to_owned).collect()
}
