use super::*;

fn unit(name: &str, text: &str) -> Result<Service, String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(name);
    std::fs::write(&file, text).unwrap();
    let read = read_with(&[file], &[]).map_err(|error| error.to_string())?;
    Ok(read.services.into_iter().next().unwrap())
}

#[test]
fn every_way_in_which_quadlet_takes_annotations_and_devices_is_read() {
    let service = unit(
        "worker.container",
        "# Annotation=sublet.sm=1
[Unit]
Annotation=sublet.sm=2
[Container]
Image=x:${TAG}
Label=a=%n
Annotation=sublet.sm=3
Annotation=
Annotation=\"sublet.sm=25\" 'other=%i b'
  Annotation = sublet.wait=5s \\
   sublet.gpu=name:a%%b
; a comment
AddDevice=-sublet/share=small.0
GlobalArgs=--log-level info --runtime=/usr/bin/sublet-runtime
PodmanArgs=--annotation sublet.memory=8GiB --privileged=false --log-opt tag=%n --device /dev/nvidia0
[Service]
Annotation=sublet.sm=99
",
    )
    .unwrap();
    let annotations: Vec<String> =
        service.annotations.iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!(annotations, ["sublet.gpu=name:a%b", "sublet.memory=8GiB", "sublet.sm=25", "sublet.wait=5s"]);
    assert_eq!(service.devices, ["sublet/share=small.0", "/dev/nvidia0"]);
    assert_eq!(
        (service.name.as_str(), service.runtime.as_deref()),
        ("worker", Some("/usr/bin/sublet-runtime"))
    );
    assert!(service.by_hook && !service.privileged && !service.gpus);
    let open = unit("a.container", "[Container]\nPodmanArgs=--privileged --gpus all\n").unwrap();
    assert!(open.privileged && open.gpus);
}

#[test]
fn labels_that_are_meant_as_annotations_are_reported() {
    let warning = |text: &str| unit("a.container", &format!("[Container]\n{text}\n")).unwrap().label_warning;
    let said = Some("labels are not annotations: write as Annotation= sublet.sm=25".to_owned());
    assert_eq!(warning("Label=app=x sublet.sm=25"), said);
    assert_eq!(warning("PodmanArgs=--label sublet.sm=25 -l=app=y"), said);
    assert_eq!(warning("Label=sublet.sm=25 sublet.gpu=0\nAnnotation=sublet.gpu=1"), said);
    assert_eq!(warning("Label=sublet.sm=25\nAnnotation=sublet.sm=50"), None);
    assert_eq!(warning("Label=sublet.sm=25\nLabel="), None);
}

#[test]
fn units_that_only_systemd_knows_are_refused() {
    for (name, text, said) in [
        ("a@.container", "", "it is a template"),
        ("a@b.container", "", "it is a template"),
        ("a.kube", "", "only .container files"),
        ("a.service", "", "only .container files"),
        ("a.container", "[Container]\nAnnotation=sublet.sm=%i\n", "specifiers of systemd"),
        ("a.container", "[Container]\nAddDevice=/dev/%i\n", "specifiers of systemd"),
    ] {
        let error = unit(name, text).unwrap_err();
        assert!(error.contains(said), "{name}: {error}");
    }
    assert!(read(&["/nonexistent/a.container".into()]).unwrap_err().to_string().contains("cannot be read"));
}

#[test]
fn drop_ins_are_read_in_their_order_and_units_are_known_by_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (dir.path().join("a.container"), dir.path().join("b.container"));
    std::fs::write(&first, "[Container]\nAnnotation=sublet.sm=5\n").unwrap();
    std::fs::write(&second, "[Container]\nServiceName=other\n").unwrap();
    let drop_ins = dir.path().join("a.container.d");
    std::fs::create_dir(&drop_ins).unwrap();
    std::fs::write(drop_ins.join("20-b.conf"), "[Container]\nAnnotation=sublet.sm=20\n").unwrap();
    std::fs::write(drop_ins.join("10-a.conf"), "[Container]\nAnnotation=sublet.sm=10\n").unwrap();
    std::fs::write(drop_ins.join("readme"), "[Container]\nAnnotation=sublet.sm=30\n").unwrap();
    let stack = read_with(&[first, second], &[]).unwrap();
    assert_eq!(stack.services[0].annotations["sublet.sm"], "20");
    assert_eq!(stack.own, Own::Units(vec!["a.service".into(), "other.service".into()]));
}

#[test]
fn drop_ins_of_all_containers_and_of_their_names_beginning_count_wherever_quadlet_looks() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, format!("[Container]\n{text}\n")).unwrap();
        path
    };
    let file = write("etc/in/team-a-worker.container", "Annotation=sublet.sm=5 sublet.gpu=0");
    write("etc/container.d/10-all.conf", "Annotation=sublet.wait=1s");
    write("usr/team-.container.d/20-team.conf", "Annotation=\nAnnotation=sublet.sm=7 sublet.wait=2s");
    write("usr/team-b-.container.d/30-other.conf", "Annotation=sublet.sm=99");
    write("etc/team-a-.container.d/40-a.conf", "Annotation=sublet.memory=1GiB");
    // The more specific one of two of one name, wherever it is.
    write("run/container.d/50-both.conf", "Annotation=sublet.memory=2GiB");
    write("usr/team-a-worker.container.d/50-both.conf", "Annotation=sublet.memory=3GiB");
    let mut search = Vec::new();
    for top in ["run", "etc", "usr"] {
        add_with_those_in_it(&root.join(top), &mut search, &|_| false);
    }
    assert_eq!(search, ["run", "etc", "etc/in", "usr"].map(|name| root.join(name)));
    let service = read_with(&[file], &search).unwrap().services.remove(0);
    let annotations: Vec<String> =
        service.annotations.iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!(annotations, ["sublet.memory=3GiB", "sublet.sm=7", "sublet.wait=2s"]);
}
