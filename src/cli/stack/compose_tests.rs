use std::path::Path;

use serde_json::json;

use super::*;

/// A file that is read as it stands.
fn plain_stack(source: &str) -> Result<Stack, String> {
    let document = plain(source).map_err(|(line, message)| format!("{line}: {message}"))?;
    stack(&document, &order(source), Path::new("/tmp/shop/compose.yaml"))
}

const SHOP: &str = "
name: shop
x-common: &common
  restart: always
services:
  web:
    image: web:${TAG:-1}
    runtime: sublet
    annotations: { sublet.sm: \"25\", sublet.memory: 8GiB, price: $$5 }
    environment: [ \"TOKEN=${TOKEN}\" ]
    logging: *common
  batch:
    runtime: sublet-small
    scale: 2
  annotated:
    annotations: [ sublet.sm=10, bare ]
    privileged: true
    devices: [ \"/dev/nvidia0:/dev/nvidia0\" ]
  cdi:
    deploy:
      replicas: 1
      resources:
        reservations:
          devices: [ { driver: cdi, device_ids: [ sublet/share=small.0 ], capabilities: [gpu] } ]
  gpus:
    deploy: { resources: { reservations: { devices: [ { capabilities: [[gpu]], driver: nvidia } ] } } }
  idle: { scale: 0, runtime: sublet }
  debug: { profiles: [debug], runtime: sublet }
";

#[test]
fn settings_of_a_share_are_read_and_the_rest_is_not_resolved() {
    let stack = plain_stack(SHOP).unwrap();
    let names: Vec<&str> = stack.services.iter().map(|service| service.name.as_str()).collect();
    assert_eq!(names, ["web", "batch-1", "batch-2", "annotated", "cdi", "gpus"], "in the order of the file");
    let [web, batch, _, annotated, cdi, gpus] = &stack.services[..] else { panic!("six") };
    let annotations: Vec<(&str, &str)> =
        web.annotations.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    assert_eq!(annotations, [("price", "$5"), ("sublet.memory", "8GiB"), ("sublet.sm", "25")]);
    assert_eq!((web.runtime.as_deref(), &web.called), (Some("sublet"), &None), "its image is not known");
    assert_eq!(batch.called, Some(("shop-batch-1".into(), "shop-batch".into())));
    assert_eq!(annotated.annotations["sublet.sm"], "10");
    assert!(annotated.privileged && !annotated.gpus && annotated.devices == ["/dev/nvidia0:/dev/nvidia0"]);
    assert!(!cdi.gpus && cdi.devices == ["sublet/share=small.0"]);
    assert!(gpus.gpus && gpus.devices.is_empty());
    assert_eq!((stack.own, stack.remarks.len()), (Own::Project("shop".into()), 1), "debug was left out");
}

#[test]
fn a_value_that_only_compose_can_resolve_is_refused_with_its_line() {
    let needs = "needs Docker Compose, which is not installed";
    for (source, line) in [
        ("services:\n  a:\n    annotations: { sublet.sm: \"${SM}\" }\n", 3),
        ("services:\n  a:\n    runtime: $RUNTIME\n", 3),
        ("services:\n  a:\n    extends: b\n", 3),
        ("x: &x { runtime: sublet }\nservices:\n  a:\n    <<: *x\n", 4),
        ("x: &x { sublet.sm: 5 }\nservices:\n  a:\n    annotations: *x\n", 4),
        ("include: [ other.yaml ]\nservices: {}\n", 1),
    ] {
        let error = plain_stack(source).unwrap_err();
        assert!(error.starts_with(&format!("{line}: ")) && error.contains(needs), "{source}: {error}");
    }
    for (source, said) in [
        ("", "the file is empty"),
        ("services: {}", "it has no services"),
        ("services: { a: { scale: many } }", "many is no number of containers"),
        ("services: { a: { scale: 5000 } }", "more than the 1000"),
        ("services: { a: { annotations: 5 } }", "annotations must be a map"),
        // Docker Compose refuses these, too.
        (
            "services: { a: { annotations: [ sublet.sm: 25 ] } }",
            "service a: annotations must be a map, KEY: VALUE, or",
        ),
        ("services: { a: { labels: [ sublet.sm: 25 ] } }", "or a list of KEY=VALUE"),
        ("services: { a: { devices: /dev/nvidia0 } }", "service a: devices must be a list"),
        (
            "services:\n  a:\n    annotation: { x: y }\n",
            "3: annotation: Compose has no such key, but annotations",
        ),
        ("services: [ a ]", "must be services by name"),
        ("services:\n  a:\n", "must be a service"),
        ("services: { a: {}, a: {} }", "a stands twice"),
        ("services: [", "no YAML"),
    ] {
        let error = plain_stack(source).unwrap_err();
        assert!(error.contains(said), "{source}: {error}");
    }
}

#[test]
fn labels_that_are_meant_as_annotations_are_reported() {
    let source = "
x: &alias { a: b }
services:
  map: { labels: { sublet.sm: \"25\", traefik.enable: \"true\" }, runtime: sublet }
  list: { labels: [ sublet.sm=25, sublet.memory=8GiB ], annotations: { sublet.memory: 4GiB } }
  both: { labels: { sublet.sm: \"25\" }, annotations: { sublet.sm: \"25\" } }
  others: { labels: { \"a.sublet.b\": \"1\" } }
  variable: { labels: [ \"host=${DOMAIN}\", \"sublet.sm=${SM}\" ] }
  alias: { labels: *alias }
";
    let stack = plain_stack(source).unwrap();
    let warnings: Vec<_> = stack.services.iter().map(|service| service.label_warning.as_deref()).collect();
    let said = "labels are not annotations: write under `annotations:` sublet.sm=25";
    let unresolved = "labels are not annotations: write under `annotations:` sublet.sm=${SM}";
    assert_eq!(warnings, [Some(said), Some(said), None, None, Some(unresolved), None]);
    // As Docker Compose prints it, with the other labels resolved.
    let resolved = json!({"services": {"a": {"labels": {"host": "x", "sublet.share": "small"}}}});
    let stack = super::stack(&resolved, &[], Path::new("compose.yaml")).unwrap();
    let warning = stack.services[0].label_warning.as_deref().unwrap();
    assert!(warning.ends_with("write under `annotations:` sublet.share=small"), "{warning}");
}

/// As Docker Compose 2.26 and 2.30 print it.
#[test]
fn resolved_services_are_read_in_the_order_of_the_file() {
    let document = json!({"name": "shop", "services": {
        "a": {"annotations": {"sublet.sm": "25", "odd": null}, "runtime": "sublet", "profiles": ["on"], "image": "x:1",
            "devices": [{"source": "sublet/share=small.0", "target": "sublet/share=small.0", "permissions": "rwm"}]},
        "b": {"devices": ["sublet/share=mig.0:1"], "deploy": {"replicas": 2}, "gpus": null}}});
    let source = "x: &alias {}\nservices:\n  b: {}\n  a: { x: *alias }\n";
    let read = |source: &str| stack(&document, &order(source), Path::new("compose.yaml")).unwrap();
    let stack = read(source);
    let names = |stack: &Stack| stack.services.iter().map(|service| service.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&stack), ["b-1", "b-2", "a"]);
    assert_eq!(names(&read("not: [ yaml")), ["a", "b-1", "b-2"], "else as Compose sorts them");
    assert_eq!(stack.services[2].devices, ["sublet/share=small.0"]);
    assert_eq!(stack.services[0].devices, ["sublet/share=mig.0:1"]);
    assert_eq!(stack.services[2].annotations["odd"], "");
    assert_eq!(stack.services[2].called, Some(("shop-a-1".into(), "x:1".into())));
}

#[test]
fn without_a_runtime_a_service_has_dockers_default_one() {
    let stack = || {
        plain_stack("services: { a: { annotations: [sublet.sm=5] }, b: {}, c: { runtime: runc } }").unwrap()
    };
    let with = with_default_runtime(stack(), Some("sublet"), true);
    let runtimes: Vec<_> = with.services.iter().map(|service| service.runtime.as_deref()).collect();
    assert_eq!(runtimes, [Some("sublet"), Some("sublet"), Some("runc")]);
    assert_eq!(with.remarks, Vec::<String>::new());
    let without = with_default_runtime(stack(), None, true);
    assert_eq!((without.services[0].runtime.as_deref(), without.remarks.len()), (None, 1));
    let by_hook = |stack: &Stack| stack.services.iter().map(|service| service.by_hook).collect::<Vec<_>>();
    assert_eq!((by_hook(&with), by_hook(&without)), (vec![false; 3], vec![true, true, false]));
    let without = with_default_runtime(stack(), None, false);
    assert_eq!(
        (by_hook(&without), without.remarks.len()),
        (vec![false; 3], 0),
        "nothing reads its annotations"
    );
}
