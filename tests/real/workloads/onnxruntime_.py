"""ONNX Runtime, if its build has the CUDA provider. It does not report memory, so the driver's view is used."""

from common import Driver, Skip, main, refusal


def model(over):
    """One matrix product, or an input repeated until it needs that many MiB."""
    from onnx import TensorProto, helper

    if over:
        node = helper.make_node("Expand", ["a", "b"], ["c"])
        inputs = [helper.make_tensor_value_info("a", TensorProto.FLOAT, [1]), helper.make_tensor_value_info("b", TensorProto.INT64, [1])]
        out = helper.make_tensor_value_info("c", TensorProto.FLOAT, [None])
    else:
        node = helper.make_node("MatMul", ["a", "b"], ["c"])
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [512, 512]) for name in "ab"]
        out = helper.make_tensor_value_info("c", TensorProto.FLOAT, [512, 512])
    made = helper.make_model(helper.make_graph([node], "g", inputs, [out]), opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 9
    return made.SerializeToString()


def ask(over):
    import numpy
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise Skip(f"onnxruntime {onnxruntime.__version__} was built without the CUDA provider")
    onnxruntime.preload_dlls()
    driver = Driver()
    devices = []
    for ordinal in range(driver.count()):
        seen = driver.look(ordinal)
        providers = [("CUDAExecutionProvider", {"device_id": ordinal})]

        def computes():
            session = onnxruntime.InferenceSession(model(None), providers=providers)
            ones = numpy.ones((512, 512), numpy.float32)
            on_gpu = session.get_providers()[0] == "CUDAExecutionProvider"
            return on_gpu and bool((session.run(None, {"a": ones, "b": ones})[0] == 512.0).all())

        def take():
            session = onnxruntime.InferenceSession(model(over), providers=providers)
            bound = session.io_binding()
            bound.bind_cpu_input("a", numpy.ones(1, numpy.float32))
            bound.bind_cpu_input("b", numpy.array([over << 18], numpy.int64))
            bound.bind_output("c", "cuda", ordinal)
            session.run_with_iobinding(bound)

        seen["correct"] = computes()
        if over:
            seen["refused"] = refusal(take, lambda error: "allocate memory" in str(error) or "out of memory" in str(error))
            seen["after"] = computes()
        devices.append(seen)
    return onnxruntime.__version__, devices


if __name__ == "__main__":
    main("ONNX Runtime", ask)
