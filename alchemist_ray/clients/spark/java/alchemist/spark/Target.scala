package alchemist.spark

import scala.collection.JavaConverters._

import com.fasterxml.jackson.databind.{JsonNode, ObjectMapper}
import com.fasterxml.jackson.module.scala.DefaultScalaModule

/** A matrix on a gang as the session describes it, in JSON; see `jvm.py`. */
private[spark] final class Target(json: JsonNode) {
  val token: String = json.get("token").asText
  val matrix: Long = json.get("matrix").asLong
  val rows: Long = json.get("rows").asLong
  val cols: Int = json.get("cols").asInt
  val element: Element = Element.of(json.get("dtype").asText)
  val mapped: Boolean = json.get("mapped").asBoolean // the ranks' memory, by tasks on their node
  val nodes: List[Target.Node] = json.get("nodes").asScala.map(new Target.Node(_)).toList

  /** All columns. */
  def columns: Array[Int] = Array.range(0, cols)

  /** The map of a PUT or GET. */
  def request(node: Target.Node): Map[String, Any] =
    Map("matrix" -> matrix, "ranks" -> node.held.map(_.rank))

  /** The same of a region that travels by rows or by columns. */
  def request(node: Target.Node, region: Region, byRow: Boolean): Map[String, Any] =
    request(node) + ("order" -> (if (byRow) "C" else "F")) +
      ("region" -> Seq(region.row0, region.row1, region.col0, region.col1))
}

private[spark] object Target {
  val JSON: ObjectMapper = new ObjectMapper().registerModule(DefaultScalaModule)

  def parse(json: String): Target = new Target(JSON.readTree(json))

  private def runs(json: JsonNode): Runs =
    new Runs(json.get(0).asLong, json.get(1).asLong, json.get(2).asLong)

  /** The rows and columns that a rank holds. */
  final class Held(json: JsonNode) {
    val rank: Int = json.get(0).asInt
    val rows: Runs = runs(json.get(1))
    val cols: Runs = runs(json.get(2))
  }

  /** One node, the ranks that take part in the transfer, and what they hold together. */
  final class Node(json: JsonNode) {
    val number: Int = json.get("number").asInt
    val host: String = json.get("host").asText
    val port: Int = json.get("port").asInt
    val chunk: Long = json.get("chunk").asLong
    val held: List[Held] = json.get("ranks").asScala.map(new Held(_)).toList
    /** Rows and columns. */
    val products: List[(Runs, Runs)] =
      json.get("products").asScala.map(pair => (runs(pair.get(0)), runs(pair.get(1)))).toList
  }
}

/** Rows [row0, row1) and columns [col0, col1) of a matrix. */
private[spark] final case class Region(row0: Long, row1: Long, col0: Long, col1: Long)

/** `width` neighbours from `first` on, again after each `period`. */
private[spark] final class Runs(val first: Long, val width: Long, val period: Long) {

  /** Those in a half-open interval: a part of a run, whole runs, a part of a run. */
  def spans(start: Long, stop: Long): List[Span] = {
    var head = first + Math.floorDiv(start - first, period) * period
    val begun = math.min(head + width, stop)
    val before = if (head < start && start < begun) {
      List(new Span(start, 1, begun - start, period))
    } else Nil
    if (head < start) head += period
    val whole = math.max(0, Math.floorDiv(stop - head - width, period) + 1)
    val rest = head + whole * period
    before ++
      (if (whole > 0) List(new Span(head, whole, width, period)) else Nil) ++
      (if (rest < stop) List(new Span(rest, 1, stop - rest, period)) else Nil)
  }

  /** How many of them are less than `stop`. */
  def count(stop: Long): Long = {
    val past = stop - first // more than -period
    if (past <= 0) 0 else past / period * width + math.min(past % period, width)
  }

  /** The place of an index among them, or -1. */
  def position(index: Long): Long = {
    val run = (index - first) / period
    val place = index - first - run * period
    if (index >= first && place < width) run * width + place else -1
  }

  def contains(index: Long): Boolean = position(index) >= 0
}

/** `runs` runs of `width` indices, the first at `start`. */
private[spark] final class Span(
    val start: Long, val runs: Long, val width: Long, val period: Long) {

  def size: Long = runs * width

  /** The same indices as one run, if no others are between its runs. */
  def joined: Span = if (width == period) new Span(start, 1, size, size) else this

  /** The same indices, at most `most` at a time. */
  def cut(most: Long): Seq[Span] =
    if (width > most) {
      for (k <- 0L until runs; offset <- 0L until width by most) yield
        new Span(start + k * period + offset, 1, math.min(most, width - offset), period)
    } else {
      val step = most / width
      for (k <- 0L until runs by step) yield
        new Span(start + k * period, math.min(step, runs - k), width, period)
    }
}

/** What the ranks of one node hold of a region, cut into the pieces in which it travels, by rows or
  * by columns.
  *
  * The same as `mpi_workers/matrix/node_shares.py`: both ends must cut alike. The session computes
  * the products of runs from the layout, so no layout is known here.
  */
private[spark] final class Share(
    node: Target.Node, region: Region, itemsize: Int, byRow: Boolean) {
  private val ROW_BYTES = 32 << 10 // as in node_shares.py

  private val slow0 = if (byRow) region.row0 else region.col0
  private val fast0 = if (byRow) region.col0 else region.row0

  private val products = for {
    (rows, cols) <- node.products
    some <- rows.spans(region.row0, region.row1)
    others <- cols.spans(region.col0, region.col1)
  } yield if (byRow) (some, others) else (others, some)

  val nbytes: Long = products.map { case (slow, fast) => slow.size * fast.size * itemsize }.sum

  /** Indices along the axis that travels slowly, and along the other. */
  private val pieces = products.flatMap { case (slow, fast) => cut(slow, fast) }

  /** Pieces of about `node.chunk` bytes; of rows, tiles: ranks store columns. */
  private def cut(slow: Span, fast: Span): Seq[(Span, Span)] = {
    val least = if (byRow) ROW_BYTES / itemsize else 1
    val across = math.max(least, node.chunk / (slow.size * itemsize))
    for {
      some <- fast.cut(math.max(1, across))
      others <- slow.cut(math.max(1, node.chunk / (some.size * itemsize)))
    } yield (others, some)
  }

  /** Send the share of a block of the region; its rows or columns have `stride` bytes. */
  def send(connection: Connection, block: Array[Byte], first: Int, stride: Long): Unit =
    walk(stride, (at, length) => connection.write(block, first + at, length))

  /** Fill a block of the region with the share; as `send`. */
  def receive(connection: Connection, block: Array[Byte], first: Int, stride: Long): Unit =
    walk(stride, (at, length) => connection.read(block, first + at, length))

  /** Visit the contiguous runs of all pieces in their order. */
  private def walk(stride: Long, copy: (Int, Int) => Unit): Unit =
    for ((slowly, quickly) <- pieces) {
      val slow = slowly.joined
      val fast = quickly.joined
      val length = (fast.width * itemsize).toInt
      var line = 0L
      while (line < slow.size) {
        val place = slow.start + line / slow.width * slow.period + line % slow.width - slow0
        var at = place * stride + (fast.start - fast0) * itemsize
        var run = 0L
        while (run < fast.runs) {
          copy(at.toInt, length)
          at += fast.period * itemsize
          run += 1
        }
        line += 1
      }
    }
}
