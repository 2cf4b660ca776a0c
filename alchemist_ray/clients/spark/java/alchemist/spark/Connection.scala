package alchemist.spark

import java.io._
import java.net.{ConnectException, InetSocketAddress, SocketTimeoutException, StandardSocketOptions}
import java.nio.{BufferUnderflowException, ByteBuffer}
import java.nio.channels.SocketChannel
import java.nio.charset.StandardCharsets.{US_ASCII, UTF_8}
import java.nio.file.{Files, InvalidPathException, Paths}
import java.security.{MessageDigest, SecureRandom}
import java.util.Arrays
import java.util.concurrent.ThreadLocalRandom
import javax.crypto.Mac
import javax.crypto.spec.SecretKeySpec

import scala.annotation.tailrec
import scala.collection.mutable.ArrayBuffer

/** An authenticated connection to a node's data endpoint: frames and payloads.
  *
  * The format is described in `mpi_workers/wire/frames.py` and `handshake.py`. On the same node, which
  * the endpoint proves (`loans.py`), the ranks' memory is mapped.
  */
private[spark] final class Connection private (target: Target, val node: Target.Node)
    extends Closeable {
  import Connection._

  /** The ranks' blocks in this process's memory; none if this process is on another node. */
  val blocks = new ArrayBuffer[RankBlock]

  /** Whether this process is on the node, and has mapped the ranks' memory. */
  var near = false
  var sentBytes, sentNanos = 0L

  private val channel = SocketChannel.open()
  private val name = s"${node.host}:${node.port}"
  private var putBegan = 0L
  private var buffer: ByteBuffer = _ // a part of a payload on its way
  private var payload = 0L // bytes of the last frame's payload
  private var left = 0L // of them, not yet read

  private def open(): Unit = {
    channel.setOption(StandardSocketOptions.SO_SNDBUF, Int.box(SOCKET_BYTES))
    channel.socket.connect(new InetSocketAddress(node.host, node.port), CONNECT_TIMEOUT_MS)
    channel.socket.setSoTimeout(STALL_TIMEOUT_MS)
    channel.setOption(StandardSocketOptions.TCP_NODELAY, Boolean.box(true))
    channel.setOption(StandardSocketOptions.SO_KEEPALIVE, Boolean.box(true))
    authenticate()
  }

  private def mapIfNear(write: Boolean): Unit = {
    val local = channel.socket.getInetAddress == channel.socket.getLocalAddress
    if (target.mapped && local && sameNode()) map(write)
  }

  private def authenticate(): Unit = {
    val nonce = new Array[Byte](NONCE_BYTES)
    new SecureRandom().nextBytes(nonce)
    send(HELLO, Map("nonce" -> nonce))
    val challenge = expect(CHALLENGE)
    val theirs = challenge("nonce").asInstanceOf[Array[Byte]]
    def proof(side: String, fields: Array[Byte]): Array[Byte] = {
      val key = MessageDigest.getInstance("SHA-256").digest(target.token.getBytes(UTF_8))
      val mac = Mac.getInstance("HmacSHA256")
      mac.init(new SecretKeySpec(key, "HmacSHA256"))
      Seq((CONTEXT + side).getBytes(US_ASCII), nonce, theirs, fields).foreach(mac.update(_: Array[Byte]))
      mac.doFinal()
    }
    val given = challenge("proof").asInstanceOf[Array[Byte]]
    if (!MessageDigest.isEqual(given, proof("listening", Array.empty))) {
      throw Failure("AuthError", s"the process at $name does not have the gang's token: it belongs " +
        "to another gang, or is not Alchemist's")
    }
    val fields = MessagePack.pack(Map("role" -> "data"))
    send(PROOF, Map("proof" -> proof("connecting", fields), "fields" -> fields))
    expect(WELCOME)
  }

  /** Whether this process finds the endpoint's files: it is on its node, and of its user. */
  private def sameNode(): Boolean = {
    send(SAME_NODE, Map.empty)
    val answer = expect(SAME_NODE)
    val nonce = answer("nonce").asInstanceOf[Array[Byte]]
    try {
      val path = Paths.get(answer("path").asInstanceOf[String])
      Files.isRegularFile(path) && Files.size(path) == nonce.length && // not a pipe
        MessageDigest.isEqual(nonce, Files.readAllBytes(path))
    } catch {
      case _: IOException | _: InvalidPathException => false
    }
  }

  private def map(write: Boolean): Unit = {
    send(MAP, target.request(node) + ("write" -> write) + ("paths" -> true))
    val answer = expect(MAP)
    val parts = answer("parts").asInstanceOf[Seq[Seq[Any]]]
    val paths = answer("paths").asInstanceOf[Seq[String]]
    near = true
    for (((held, part), path) <- node.held.zip(parts).zip(paths)) {
      blocks += new RankBlock(target, held, path, part(2).asInstanceOf[Long])
    }
  }

  /** End the use of the blocks, and tell the ranks how much was written. */
  def beginUnmap(): Unit = {
    blocks.foreach(_.close())
    sentBytes += blocks.map(_.written).sum * target.element.nbytes
    val written = blocks.map(block => Seq(block.rank, block.written))
    send(UNMAP, Map("matrix" -> target.matrix, "written" -> written))
  }

  /** Begin a PUT; its payload follows through `write`, then `endPut`. */
  def beginPut(body: Map[String, Any], nbytes: Long): Unit = {
    sentBytes += nbytes
    putBegan = System.nanoTime
    send(PUT, body, nbytes)
    if (buffer == null) buffer = ByteBuffer.allocateDirect(STAGING_BYTES)
    buffer.clear()
  }

  def write(bytes: Array[Byte], at: Int, length: Int): Unit = {
    var done = 0
    while (done < length) {
      if (!buffer.hasRemaining) flush()
      val part = math.min(length - done, buffer.remaining)
      buffer.put(bytes, at + done, part)
      done += part
    }
  }

  def endPut(): Unit = {
    flush()
    sentNanos += System.nanoTime - putBegan
  }

  /** Stream the buffer. Fails with the endpoint's reason if it has refused the frame. */
  private def flush(): Unit = {
    buffer.flip()
    orRefusal {
      while (buffer.hasRemaining) {
        if (channel.socket.getInputStream.available > 0) {
          throw new IOException("the data endpoint refused the data")
        }
        channel.write(buffer)
      }
    }
    buffer.clear()
  }

  /** Ask for a payload of this size, which `read` returns. */
  def get(body: Map[String, Any], nbytes: Long): Unit = {
    send(GET, body)
    expect(DATA)
    left = payload
    if (left != nbytes) throw new IOException(s"the node sent $left bytes instead of $nbytes")
    if (buffer == null) buffer = ByteBuffer.allocate(STAGING_BYTES)
    buffer.limit(0)
  }

  def read(into: Array[Byte], at: Int, length: Int): Unit = {
    var done = 0
    while (done < length) {
      if (!buffer.hasRemaining) {
        buffer.clear()
        buffer.limit(math.min(buffer.capacity, left).toInt)
        left -= buffer.limit()
        read(buffer)
      }
      val part = math.min(length - done, buffer.remaining)
      buffer.get(into, at + done, part)
      done += part
    }
  }

  /** Ask the endpoint to store and count everything. */
  def beginSync(): Unit = send(SYNC, Map.empty)

  /** Wait until it has; its times. */
  def endSync(): Map[String, Any] = expect(SYNC)

  private def send(kind: Int, body: Map[String, Any], payloadBytes: Long = 0): Unit = {
    val packed = if (body.isEmpty) Array.emptyByteArray else MessagePack.pack(body)
    val head = ByteBuffer.allocate(HEADER_BYTES + packed.length)
    head.put(MAGIC).putShort(VERSION).putShort(kind.toShort)
    head.putInt(packed.length).putLong(payloadBytes).put(packed).flip()
    orRefusal(while (head.hasRemaining) channel.write(head))
  }

  /** An error of writing, or the reason that the endpoint gave before it closed the connection. */
  private def orRefusal(writing: => Unit): Unit =
    try writing
    catch {
      case error: IOException =>
        if (channel.isOpen) { // not interrupted
          try expect(SYNC)
          catch {
            case failure: Failure => throw failure
            case again: IOException => error.addSuppressed(again)
          }
        }
        throw error
    }

  /** The map of the next frame, which must be of this kind. */
  private def expect(kind: Int): Map[String, Any] = {
    val head = ByteBuffer.allocate(HEADER_BYTES)
    read(head)
    val magic = new Array[Byte](MAGIC.length)
    head.get(magic)
    val version = head.getShort
    val found = head.getShort
    val mapBytes = head.getInt
    payload = head.getLong
    if (!Arrays.equals(magic, MAGIC) || version != VERSION) {
      throw new IOException(s"$name does not speak version $VERSION of Alchemist's protocol: " +
        "install the same alchemist-on-ray on both sides")
    }
    if (mapBytes < 0 || mapBytes > MAP_LIMIT) {
      throw new IOException(s"a map of $mapBytes bytes is over the limit")
    }
    val packed = ByteBuffer.allocate(mapBytes)
    read(packed)
    val body = MessagePack.unpack(packed.array)
    if (found == REFUSED) throw new Failure(body)
    if (found != kind) throw new IOException(s"expected a frame of kind $kind, got $found")
    body
  }

  /** Fill a buffer with an array, and flip it. */
  private def read(into: ByteBuffer): Unit = {
    val stream = channel.socket.getInputStream // a channel's own read has no limit
    while (into.hasRemaining) {
      val found =
        try stream.read(into.array, into.arrayOffset + into.position(), into.remaining)
        catch {
          case error: SocketTimeoutException => throw new IOException(
            s"the data endpoint at $name sent nothing for ${STALL_TIMEOUT_MS / 1000} s", error)
        }
      if (found < 0) throw new EOFException(s"the data endpoint at $name closed the connection")
      into.position(into.position() + found)
    }
    into.flip()
  }

  override def close(): Unit = { // it ends the use of the ranks' memory
    blocks.foreach(_.close())
    channel.close()
  }
}

private[spark] object Connection {
  private val HELLO = 1
  private val WELCOME = 2
  private val REFUSED = 3
  private val PUT = 7
  private val GET = 8
  private val DATA = 9
  private val MAP = 10
  private val UNMAP = 11
  private val SYNC = 12
  private val CHALLENGE = 13
  private val PROOF = 14
  private val SAME_NODE = 15

  private val MAGIC = "ALCH".getBytes(US_ASCII)
  private val VERSION: Short = 3
  private val CONTEXT = s"alchemist-on-ray wire $VERSION "
  private val HEADER_BYTES = 20
  private val MAP_LIMIT = 64 << 20
  private val NONCE_BYTES = 32
  private val CONNECT_TIMEOUT_MS = 10000
  private val RETRY_MS = 10 // longest pause before the second attempt, and before any
  private val MAX_RETRY_MS = 500
  private val STALL_TIMEOUT_MS = 600000 // as in mpi_workers/deadlines.py
  private val SOCKET_BYTES = 1 << 20
  private val STAGING_BYTES = 512 << 10

  /** Connections to all nodes of a matrix. Where this process is on the node of a rank, its block is
    * mapped, to read it, or to write it until `beginUnmap`.
    */
  def all(target: Target, write: Boolean): List[Connection] = {
    val found = new ArrayBuffer[Connection]
    try {
      for (node <- target.nodes) {
        found += opened(target, node, System.nanoTime + 1000000L * CONNECT_TIMEOUT_MS)
        found.last.mapIfNear(write)
      }
    } catch {
      case error: Throwable =>
        found.foreach(_.close())
        throw error
    }
    found.toList
  }

  /** A connection to a node; again after a random pause, if the endpoint drops it because many connect
    * at the same time (`persist` of `mpi_workers/wire/blocking.py`).
    */
  @tailrec
  private def opened(
      target: Target, node: Target.Node, deadline: Long, longestMs: Int = RETRY_MS): Connection = {
    val one = new Connection(target, node)
    val dropped =
      try { one.open(); false }
      catch {
        case error: Throwable =>
          one.close()
          error match {
            case _: Failure | _: ConnectException => throw error
            case _: IOException if System.nanoTime < deadline => true
            case _ => throw error
          }
      }
    if (!dropped) one
    else {
      Thread.sleep(1L + ThreadLocalRandom.current.nextInt(longestMs))
      opened(target, node, deadline, math.min(2 * longestMs, MAX_RETRY_MS))
    }
  }
}

/** The part of MessagePack that the maps of frames need; Spark ships no library for it. */
private[spark] object MessagePack {
  private val MAX_DEPTH = 16

  def pack(map: Map[String, Any]): Array[Byte] = {
    val packed = new ByteArrayOutputStream
    put(new DataOutputStream(packed), map)
    packed.toByteArray
  }

  private def put(out: DataOutputStream, value: Any): Unit = {
    def head(code: Int, length: Int): Unit = {
      out.write(code)
      out.writeInt(length)
    }
    value match {
      case map: Map[_, _] =>
        head(0xdf, map.size)
        map.foreach { case (key, item) => put(out, key); put(out, item) }
      case items: Seq[_] =>
        head(0xdd, items.size)
        items.foreach(put(out, _))
      case text: String =>
        val bytes = text.getBytes(UTF_8)
        head(0xdb, bytes.length)
        out.write(bytes)
      case bytes: Array[Byte] =>
        head(0xc6, bytes.length)
        out.write(bytes)
      case flag: Boolean => out.write(if (flag) 0xc3 else 0xc2)
      case number: Number =>
        out.write(0xd3)
        out.writeLong(number.longValue)
    }
  }

  def unpack(packed: Array[Byte]): Map[String, Any] =
    try {
      if (packed.isEmpty) Map.empty else take(ByteBuffer.wrap(packed), 0) match {
        case map: Map[_, _] => map.asInstanceOf[Map[String, Any]]
        case _ => throw new IOException("the content of a frame is not a map")
      }
    } catch {
      case _: BufferUnderflowException => throw new IOException("malformed map in a frame")
    }

  private def take(in: ByteBuffer, depth: Int): Any = {
    if (depth > MAX_DEPTH) throw new IOException("a map in a frame is nested too deeply")
    def list(length: Long): List[Any] = times(length, take(in, depth + 1))
    def map(length: Long): Map[String, Any] =
      times(length, String.valueOf(take(in, depth + 1)) -> take(in, depth + 1)).toMap
    in.get & 0xff match {
      case code if code < 0x80 || code >= 0xe0 => code.toByte.toLong
      case code if code < 0x90 => map(code & 0x0f)
      case code if code < 0xa0 => list(code & 0x0f)
      case code if code < 0xc0 => text(in, code & 0x1f)
      case 0xc0 => null
      case 0xc2 => false
      case 0xc3 => true
      case code @ (0xc4 | 0xc5 | 0xc6) => bytes(in, number(in, 1 << code - 0xc4))
      case 0xca => in.getFloat.toDouble
      case 0xcb => in.getDouble
      case code @ (0xcc | 0xcd | 0xce | 0xcf) => number(in, 1 << code - 0xcc)
      case 0xd0 => in.get.toLong
      case 0xd1 => in.getShort.toLong
      case 0xd2 => in.getInt.toLong
      case 0xd3 => in.getLong
      case code @ (0xd9 | 0xda | 0xdb) => text(in, number(in, 1 << code - 0xd9))
      case code @ (0xdc | 0xdd) => list(number(in, 2 << code - 0xdc))
      case code @ (0xde | 0xdf) => map(number(in, 2 << code - 0xde))
      case code => throw new IOException(s"unknown type $code in a frame")
    }
  }

  /** An unsigned number of so many bytes. */
  private def number(in: ByteBuffer, nbytes: Int): Long =
    (0 until nbytes).foldLeft(0L)((found, _) => found << 8 | in.get & 0xff)

  private def bytes(in: ByteBuffer, length: Long): Array[Byte] = {
    if (length > in.remaining) throw new BufferUnderflowException
    val found = new Array[Byte](length.toInt)
    in.get(found)
    found
  }

  private def text(in: ByteBuffer, length: Long): String = new String(bytes(in, length), UTF_8)

  /** Evaluate `item` so many times; the buffer ends first if the length is wrong. */
  private def times[T](length: Long, item: => T): List[T] =
    Iterator.iterate(0L)(_ + 1).takeWhile(_ < length).map(_ => item).toList
}

/** An error in the form of `mpi_workers.failures`: the name of an error class, and a message. */
private[spark] final class Failure(val fields: Map[String, Any])
    extends IOException(String.valueOf(fields.getOrElse("message", "")))

private[spark] object Failure {
  def apply(kind: String, message: String): Failure =
    new Failure(Map("kind" -> kind, "message" -> message, "facts" -> Map.empty))
}
