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
