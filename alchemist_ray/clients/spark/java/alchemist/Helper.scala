package alchemist

import java.io.IOException
import java.net.InetAddress
import java.security.SecureRandom
import java.util.{ArrayList, List => JList}
import java.util.concurrent.{LinkedBlockingQueue, SynchronousQueue, TimeUnit}

import scala.collection.JavaConverters._

import org.apache.spark.sql.SparkSession
import py4j.ClientServer

/** The Python process that holds the session of an `AlchemistContext`.
  *
  * It connects to a server of py4j in this process, as PySpark does, takes requests, and answers
  * them. Only a process with the secret, which is in its environment, can connect.
  */
private[alchemist] final class Helper(spark: SparkSession, context: AlchemistContext) {
  import Helper._

  private val entry = new Entry(spark)
  private val secret = {
    val bytes = new Array[Byte](32)
    new SecureRandom().nextBytes(bytes)
    bytes.map(byte => f"$byte%02x").mkString
  }
  private val server = new ClientServer.ClientServerBuilder(entry)
    .javaPort(0).javaAddress(InetAddress.getLoopbackAddress).authToken(secret)
    .autoStartJavaServer(false).build()
  private val process = {
    // The server's threads are daemons, as the thread that starts them: they keep no program.
    val starting = new Thread(() => server.startServer(), "alchemist-helper")
    starting.setDaemon(true)
    starting.start()
    starting.join()
    val command = new ProcessBuilder(python(spark), "-m", MODULE)
    command.redirectError(ProcessBuilder.Redirect.INHERIT)
    command.redirectOutput(ProcessBuilder.Redirect.INHERIT)
    command.environment.put("PYSPARK_GATEWAY_PORT", server.getJavaServer.getListeningPort.toString)
    command.environment.put("PYSPARK_GATEWAY_SECRET", secret)
    command.environment.put("PYSPARK_PIN_THREAD", "true")
    try command.start()
    catch {
      case error: IOException =>
        server.shutdown()
        throw new AlchemistException("LaunchError", s"${command.command.get(0)} cannot be run " +
          s"(${error.getMessage}): set $PYTHON to a Python that has alchemist-on-ray")
    }
  }

  /** Send a request, and wait for the answer while watching the process. */
  def request(operation: String, arguments: Seq[Any], dropped: Seq[Any]): Any = synchronized {
    if (closed) {
      throw new AlchemistException("SessionError", "this AlchemistContext has been stopped")
    }
    val request = new Request(context, operation, list(arguments), list(dropped))
    while (!entry.requests.offer(request, POLL_MS, TimeUnit.MILLISECONDS)) check()
    var answer = request.answers.poll(POLL_MS, TimeUnit.MILLISECONDS)
    while (answer == null) {
      check()
      answer = request.answers.poll(POLL_MS, TimeUnit.MILLISECONDS)
    }
    answer.fold({ case (kind, message) => throw new AlchemistException(kind, message) }, identity)
  }

  private def check(): Unit = if (!process.isAlive) {
    throw new AlchemistException("SessionError",
      s"the Python process of the session has ended with code ${process.exitValue}; its output " +
        s"says why. It needs alchemist-on-ray[spark]: set $PYTHON to a Python that has it")
  }

  @volatile private var closed = false

  /** End the process: the end of its input tells it to end the session. */
  def close(): Unit = if (!closed) {
    closed = true
    process.getOutputStream.close()
    if (!process.waitFor(STOP_S, TimeUnit.SECONDS)) process.destroyForcibly()
    server.shutdown()
  }
}

private[alchemist] object Helper {
  private val MODULE = "alchemist_ray.clients.spark.jvm_session"
  private val PYTHON = "spark.alchemist.python"
  private val POLL_MS = 500L
  private val STOP_S = 60L

  /** The setting of this project, then those of Spark. */
  private def python(spark: SparkSession): String = {
    val settings = Seq(PYTHON, "spark.pyspark.driver.python", "spark.pyspark.python")
    val variables = Seq("PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON")
    val conf = spark.sparkContext.getConf
    (settings.flatMap(conf.getOption(_)) ++ variables.flatMap(sys.env.get(_)) :+ "python3").head
  }

  private def list(values: Seq[Any]): JList[Any] = new ArrayList[Any](values.asJava)

  // --- called by the Python process ---

  /** Its first object. */
  final class Entry(val spark: SparkSession) {
    private[alchemist] val requests = new SynchronousQueue[Request]

    /** The next request, or null after `seconds`. */
    def take(seconds: Int): Request = requests.poll(seconds, TimeUnit.SECONDS)
  }

  final class Request(
      context: AlchemistContext, val operation: String, val arguments: JList[Any],
      val dropped: JList[Any]) {
    /** A kind of error and its message, or a value. */
    private[alchemist] val answers = new LinkedBlockingQueue[Either[(String, String), Any]]

    def succeed(value: Any): Unit = answers.add(Right(value))

    def fail(kind: String, message: String): Unit = answers.add(Left(kind -> message))

    def matrix(
        id: Long, name: String, rows: Long, cols: Long, dtype: String, layout: String): AlMatrix =
      context.matrix(id, name, rows, cols, dtype, layout)
  }
}
